"""Pieces: kernels that only return new tensors, run on parts whose results are independent of each other.

Layer norms treat rows, attention treats batch rows and heads one by one, so calling the kernel on a part gives the
bits of the whole, needs scratch for that part only, and the copy into the result's place finds the part in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch

from lading.runtime.scratch import bytes_of, inner_bytes
from lading.units import KiB

#: Results of one part: small enough to stay in a cache, large enough to hide a call.
PIECE_BYTES = 512 * KiB

Call = Callable[[], object]
Outs = Sequence[torch.Tensor | None]
Pieces = tuple[list[tuple[Call, list[tuple[int, torch.Tensor]]]], int]


def in_pieces(
    operation: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], outs: Outs
) -> tuple[Call, int] | None:
    """(what runs the operation part by part, its scratch bytes); None where it cannot be or need not be parted.

    Args:
        operation: Name without namespace and overload.
        function: The functional kernel.
        outs: Where the results go; None for one that is dropped.
    """
    if bytes_of(outs) <= 2 * PIECE_BYTES:
        return None
    match operation:
        case "native_layer_norm":
            pieces = _layer_norm(function, args, outs)
        case "native_layer_norm_backward":
            pieces = _layer_norm_backward(function, args, outs)
        case "_scaled_dot_product_flash_attention_for_cpu":
            pieces = _attention(operation, function, args, kwargs, outs, num_tensors=3)
        case "_scaled_dot_product_flash_attention_for_cpu_backward":
            pieces = _attention(operation, function, args, kwargs, outs, num_tensors=6)
        case _:
            return None
    return None if pieces is None else (_runner(pieces[0]), pieces[1])


def _runner(calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]]) -> Call:
    """Run each call and copy its results by position."""

    def run() -> None:
        for call, places in calls:
            results: Any = call()
            for index, place in places:
                place.copy_(results[index])
            del results  # before the next call allocates its own

    return run


def _places(outs: Outs) -> list[tuple[int, torch.Tensor]]:
    return [(i, out) for i, out in enumerate(outs) if out is not None]


def _rows(tensors: Sequence[torch.Tensor | None], width: int) -> list[torch.Tensor | None] | None:
    """Each tensor as [rows, width], without a copy; None if one does not lie so."""
    if any(t is not None and not t.is_contiguous() for t in tensors):
        return None
    return [None if t is None else t.view(-1, width) for t in tensors]


def _cuts(count: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _layer_norm(function: Callable[..., Any], args: Sequence[Any], outs: Outs) -> Pieces | None:
    x, shape, weight, bias, eps = args
    width = prod(shape)
    wide, narrow = _rows([x, outs[0]], width), _rows(outs[1:], 1)
    if wide is None or narrow is None:
        return None
    step = max(1, PIECE_BYTES // (width * x.element_size()))
    calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]] = []
    for cut in _cuts(x.numel() // width, step):
        part = [None if t is None else t[cut] for t in (wide[1], *narrow)]
        assert wide[0] is not None
        calls.append((partial(function, wide[0][cut], [width], _flat(weight), _flat(bias), eps), _places(part)))
    return calls, step * (width * x.element_size() + 16)


def _layer_norm_backward(function: Callable[..., Any], args: Sequence[Any], outs: Outs) -> Pieces | None:
    """The input's gradient row by row; those of weight and bias, which sum over rows, in one call as ever."""
    grad, x, shape, mean, rstd, weight, bias, mask = args
    width = prod(shape)
    wide, narrow = _rows([grad, x, outs[0]], width), _rows([mean, rstd], 1)
    if wide is None or narrow is None or outs[0] is None:
        return None
    step = max(1, PIECE_BYTES // (width * x.element_size()))
    calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]] = []
    for cut in _cuts(x.numel() // width, step):
        g, y, place, m, r = (t[cut] for t in (*wide, *narrow) if t is not None)
        parts = (g, y, [width], m, r, _flat(weight), _flat(bias), [True, False, False])
        calls.append((partial(function, *parts), [(0, place)]))
    rest = [False, mask[1] and outs[1] is not None, mask[2] and outs[2] is not None]
    if any(rest):
        calls.append((partial(function, *args[:7], rest), _places((None, *outs[1:]))))
    inner = inner_bytes("native_layer_norm_backward", [grad, x], outs)
    return calls, max(step * width * x.element_size(), bytes_of(outs[1:]) + inner)


def _flat(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.reshape(-1)


def _attention(
    operation: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outs: Outs,
    *,
    num_tensors: int,
) -> Pieces | None:
    """Some heads of one batch row at a time, or some rows."""
    tensors, rest = args[:num_tensors], args[num_tensors:]
    batch, heads = tensors[0].shape[:2]
    if any(t.shape[:2] != (batch, heads) for t in tensors):
        return None
    rows, some = _tile(batch, heads, bytes_of(outs) // (batch * heads), torch.get_num_threads())
    calls: list[tuple[Call, list[tuple[int, torch.Tensor]]]] = []
    scratch = 0
    for row, head in product(_cuts(batch, rows), _cuts(heads, some)):
        parts = [_part(t, row, head) for t in tensors]
        named = {k: _part(v, row, head) if k == "attn_mask" and v is not None else v for k, v in kwargs.items()}
        places = [None if out is None else _part(out, row, head) for out in outs]
        calls.append((partial(function, *parts, *rest, **named), _places(places)))
        masks = [v for v in named.values() if isinstance(v, torch.Tensor)]
        scratch = max(scratch, bytes_of(places) + inner_bytes(operation, [*parts, *masks], places))
    return calls, scratch


def _tile(batch: int, heads: int, head_bytes: int, threads: int) -> tuple[int, int]:
    """Batch rows and heads of one part: of the parts that keep the threads busy, the smallest from PIECE_BYTES on.

    The kernel gives whole heads to threads, so a part of five heads keeps two threads as long as one of six.
    """
    least = min(max(-(-PIECE_BYTES // head_bytes), 2 * threads), batch * heads)
    tiles = [(1, some) for some in range(1, heads)] + [(rows, heads) for rows in range(1, batch + 1)]
    large = [(rows, some) for rows, some in tiles if rows * some >= least]
    allowed = [(rows, some) for rows, some in large if rows * some <= 4 * least] or large[:1]

    def turns(tile: tuple[int, int]) -> int:
        cuts = product(_cuts(batch, tile[0]), _cuts(heads, tile[1]))
        return sum(-(-((a.stop - a.start) * (b.stop - b.start)) // threads) for a, b in cuts)

    return min(allowed, key=lambda tile: (turns(tile), tile[0] * tile[1]))


def _part(t: torch.Tensor, row: slice, head: slice) -> torch.Tensor:
    """Ranges of batch and heads; of a mask that is the same for all of them, all."""
    if t.dim() < 3:
        return t
    t = t if t.shape[0] == 1 else t[row]
    return t if t.shape[1] == 1 else t[:, head]

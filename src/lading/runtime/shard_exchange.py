"""Shards on their way between the ranks of a group: gathered into a whole, or summed into one, by direct sends."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

#: Bytes that a rank receives at a time of what it sums.
_RECEIVED_BYTES = 4 << 20
#: First tag of shards, above those of stages.
_FIRST_TAG = 1 << 20


def gather_shards(values: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``values`` with the shards of all ranks of a group, one after another.

    Each rank sends its own to every other: gloo's gather takes a copy of all of them, and sends no faster.
    Shapes: shard (n,) -> values (ranks * n,).
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = values.view(ranks, len(shard))
    others = _other_ranks(rank, ranks)
    exchange = _Exchange({peer: parts[peer] for peer in others}, dict.fromkeys(others, shard), group)
    parts[rank].copy_(shard)
    exchange.wait()


def exchange_parts(arrived: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Send every rank of a group its part of ``values``; ``arrived`` has what they sent, one after another.

    Shapes: values (ranks * n,) -> arrived (ranks * n,).
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    into, parts, others = arrived.view(ranks, -1), values.view(ranks, -1), _other_ranks(rank, ranks)
    exchange = _Exchange({peer: into[peer] for peer in others}, {peer: parts[peer] for peer in others}, group)
    into[rank].copy_(parts[rank])
    exchange.wait()


def sum_shards(shard: torch.Tensor, values: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fill a shard with this rank's part of the sum of ``values`` over all ranks of a group, added in their order.

    Each rank sends every other one that one's part: gloo's own reduces all of a copy on each rank, which sends twice as
    many bytes. It goes by pieces, so that one is added while the next is on its way.
    Shapes: values (ranks * n,) -> shard (n,).
    """
    ranks, rank, length = dist.get_world_size(group), dist.get_rank(group), len(shard)
    parts, others = values.view(ranks, length), _other_ranks(rank, ranks)
    width = min(length, max(1, _RECEIVED_BYTES // (2 * max(1, ranks - 1) * shard.element_size())))
    rooms = shard.new_empty(2, len(others), width)

    def begin(start: int) -> _Exchange:
        turn, piece = start // width % 2, slice(start, min(start + width, length))
        into = {peer: rooms[turn, number, : piece.stop - start] for number, peer in enumerate(others)}
        return _Exchange(into, {peer: parts[peer, piece] for peer in others}, group, turn)

    following = begin(0)
    for start in range(0, length, width):
        current, following = following, begin(start + width) if start + width < length else following
        current.wait()
        total = shard[start : start + width]
        current.into[rank] = parts[rank, start : start + width]
        total.copy_(current.into[0])
        for peer in range(1, ranks):
            total.add_(current.into[peer])


def rooms_bytes(size_bytes: int, ranks: int) -> int:
    """Bytes that a reduction of so many bytes over ranks takes while it runs, as ``sum_shards`` does."""
    return min(_RECEIVED_BYTES, 2 * (ranks - 1) * size_bytes // ranks)


def _other_ranks(rank: int, ranks: int) -> list[int]:
    """Ranks of a group but this one, the next first, so that not all send to the same one first."""
    return [(rank + step) % ranks for step in range(1, ranks)]


class _Exchange:
    """Tensors on their way to and from other ranks of a group.

    Attributes:
        into: Tensor to fill, by the rank that sends it.
    """

    def __init__(
        self,
        into: dict[int, torch.Tensor],
        sent: dict[int, torch.Tensor],
        group: dist.ProcessGroup | None,
        turn: int = 0,
    ) -> None:
        self.into, tag = into, _FIRST_TAG + turn
        self._works = [dist.irecv(tensor, group=group, group_src=peer, tag=tag) for peer, tensor in into.items()]
        self._works += [dist.isend(tensor, group=group, group_dst=peer, tag=tag) for peer, tensor in sent.items()]

    def wait(self) -> None:
        """Wait until all have come and gone."""
        for work in self._works:
            cast("dist.Work", work).wait()

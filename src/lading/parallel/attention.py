"""Attention of a rank, with context parallel: how keys and values of other ranks' tokens meet its queries.

Tokens are dealt out so that with a causal mask each rank has as many pairs of query and key as any other (a piece from
the front and one from the back, as Megatron's context parallel and torch's ``context_parallel`` do).
"""

from __future__ import annotations

import dataclasses

from lading.errors import ConfigError
from lading.ir.work import Attention, Collective, Kernel, LocalTensor
from lading.parallel.choose import CONTEXT
from lading.parallel.specs import CutKernel


def attention_kernels(k: CutKernel, kernel: Kernel, tensors: list[LocalTensor], cp: int, cp_comm: str) -> list[Kernel]:
    """One attention as the kernels and collectives of a rank.

    Args:
        k: With query, key and value in its spec.
        kernel: The same with its bytes.
        tensors: Of the rank's segment.
        cp, cp_comm: As of a Layout.
    """
    assert k.spec is not None
    whole = _local_attention(k, tensors)
    if k.spec.axis != CONTEXT:  # keys of a text beside are whole on every rank
        return [dataclasses.replace(kernel, detail=whole)]
    if cp_comm == "ring":
        return _ring(kernel, whole, _bytes(k, tensors), cp)
    if cp_comm == "all_gather":
        return _all_gather(kernel, whole, _bytes(k, tensors), cp)
    return _all_to_all(k, kernel, whole, tensors, cp)


def _local_attention(k: CutKernel, tensors: list[LocalTensor]) -> Attention:
    assert k.spec is not None
    q, key, value = (tensors[t].shape for t in k.spec.tensors)
    settings = dict(k.settings)
    window = settings.get("window", 0)
    return Attention(
        batch=q[0],
        heads=q[1],
        kv_heads=key[1],
        query_tokens=q[2],
        key_tokens=key[2],
        qk_dim=q[3],
        v_dim=value[3],
        causal=bool(settings.get("is_causal")),
        backward="backward" in k.name,
        window=window if isinstance(window, int) else 0,
    )


def _bytes(k: CutKernel, tensors: list[LocalTensor]) -> int:
    """Of a rank's own keys and values."""
    assert k.spec is not None
    return sum(tensors[t].size_bytes for t in k.spec.tensors[1:])


def _share(kernel: Kernel, detail: Attention) -> Kernel:
    return dataclasses.replace(kernel, detail=detail)


def _collective(kernel: Kernel, op: str, size_bytes: int, tensors: tuple[int, ...]) -> Kernel:
    """In place among the kernels: what stands behind it may use what it brings."""
    detail = Collective(op, "cp", size_bytes)
    return Kernel(op, None, kernel.stage, kernel.module, kernel.dtype, size_bytes, size_bytes, tensors, (), detail)


def _kv(kernel: Kernel) -> tuple[int, ...]:
    first = 2 if "backward" in kernel.name else 1
    return kernel.inputs[first : first + 2]


def _ring(kernel: Kernel, whole: Attention, kv_bytes: int, cp: int) -> list[Kernel]:
    """Own keys first; then the next rank's, cp - 1 times: with a causal mask half of the pairs of each."""
    if whole.window:
        raise ConfigError("layout: attention with a window needs cp_comm=all_gather, got ring")
    keys = whole.key_tokens // 2 if whole.causal else whole.key_tokens
    other = dataclasses.replace(whole, causal=False, key_tokens=keys)
    found: list[Kernel] = []
    for step in range(cp):
        if step < cp - 1:
            found.append(_collective(kernel, "send", kv_bytes, _kv(kernel)))
        found.append(_share(kernel, whole if step == 0 else other))
        if whole.backward:  # gradients of keys and values travel with them, and once more to come home
            found.append(_collective(kernel, "send", kv_bytes, kernel.outputs[1:3]))
    return found


def _all_gather(kernel: Kernel, whole: Attention, kv_bytes: int, cp: int) -> list[Kernel]:
    """Keys and values of all tokens; with a causal mask as many pairs as with half of them and no mask."""
    tokens = whole.key_tokens * cp
    keys = tokens // 2 if whole.causal and not whole.window else tokens
    if whole.window:
        keys = min(tokens, whole.window)
    detail = dataclasses.replace(whole, causal=False, key_tokens=keys, window=0)
    found = [_collective(kernel, "all_gather", kv_bytes * cp, _kv(kernel)), _share(kernel, detail)]
    if whole.backward:
        found.append(_collective(kernel, "reduce_scatter", kv_bytes * cp, kernel.outputs[1:3]))
    return found


def _all_to_all(k: CutKernel, kernel: Kernel, whole: Attention, tensors: list[LocalTensor], cp: int) -> list[Kernel]:
    """All tokens of a part of the heads: queries, keys and values go there, the result comes back."""
    if whole.heads % cp or (whole.kv_heads % cp and cp % whole.kv_heads):
        can = max(d for d in range(1, cp + 1) if whole.heads % d == 0)
        raise ConfigError(
            f"layout: cp_comm=all_to_all spreads heads over cp ranks: expected {whole.heads} heads of a tp rank "
            f"to be a multiple of cp, got cp {cp}; the nearest that can be is {can}, or use cp_comm=ring"
        )
    assert k.spec is not None
    detail = dataclasses.replace(
        whole,
        heads=whole.heads // cp,
        kv_heads=max(1, whole.kv_heads // cp),
        query_tokens=whole.query_tokens * cp,
        key_tokens=whole.key_tokens * cp,
    )
    q_bytes = tensors[k.spec.tensors[0]].size_bytes
    o_bytes = q_bytes * whole.v_dim // whole.qk_dim
    going = [q_bytes, *(tensors[t].size_bytes for t in k.spec.tensors[1:])]
    before, after = ([o_bytes], going) if whole.backward else (going, [o_bytes])
    return [
        *(_collective(kernel, "all_to_all", size, kernel.inputs[:1]) for size in before),
        _share(kernel, detail),
        *(_collective(kernel, "all_to_all", size, kernel.outputs[:1]) for size in after),
    ]

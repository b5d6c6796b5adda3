"""Recompute: which kernels of forward run again before backward, and what is kept instead of their results.

Full keeps what enters a segment. Selective runs named parts again: the core of attention (Korthikanti 2022, arXiv
2205.05198), or other modules; what a part hands on is kept by those who use it, unless it is a part whose results
Megatron's output-discarding recompute frees as well (norms, activation functions, up-projections of latent attention).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lading.errors import ConfigError
from lading.ir.graph import OpKind, Role
from lading.ir.work import Attention, Collective, Form, Kernel, Product, RankSegment, Stage

#: Element by element: what a fused kernel keeps in registers.
POINTWISE = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
#: Words for parts of a block that are no module's name; see ``recomputed``.
CORE, NORMS, ACTIVATIONS, UP_PROJECTIONS, OPERATIONS = "core_attn", "layernorm", "act", "mla_up_proj", "op"
_DISCARDED = frozenset({NORMS, ACTIVATIONS, UP_PROJECTIONS})
_ALIASES = {"moe_act": ACTIVATIONS, "mlp_act": ACTIVATIONS, "norm": NORMS, "moe": "experts"}


@dataclass(frozen=True)
class Recomputed:
    """Changes that recompute makes to a segment.

    Attributes:
        kernels: Places among the segment's kernels that run again before its backward, in order.
        saved: Local tensors kept from forward to backward, one of each storage.
    """

    kernels: tuple[int, ...]
    saved: tuple[int, ...]


class Flow:
    """Makers and users of each storage of segments of one form, without sizes."""

    def __init__(self, form: Form) -> None:
        self.segment = segment = form.segment
        self.makers: dict[int, list[int]] = {}
        self.users: dict[int, list[int]] = {}
        for place, kernel in enumerate(segment.kernels):
            for storage in self.storages(kernel.inputs):
                self.users.setdefault(storage, []).append(place)
            for storage in self.storages(kernel.outputs):
                self.makers.setdefault(storage, []).append(place)

    def storages(self, tensors: Iterable[int]) -> list[int]:
        """Distinct storages of local tensors, in order."""
        return list(dict.fromkeys(self.segment.tensors[t].storage for t in tensors))

    @cached_property
    def forward(self) -> list[int]:
        """Places of the kernels of forward."""
        return [place for place, kernel in enumerate(self.segment.kernels) if kernel.stage is Stage.FORWARD]

    @cached_property
    def saved_storages(self) -> list[int]:
        """Storages that backward reads of what was there before it."""
        return self.storages(self.segment.saved)

    def users_forward(self, storage: int) -> set[int]:
        """Numbers of the forward kernels that read a storage."""
        return {p for p in self.users.get(storage, ()) if self.segment.kernels[p].stage is Stage.FORWARD}

    def makers_forward(self, storage: int) -> list[int]:
        """Numbers of the forward kernels that write a storage, in order."""
        return [p for p in self.makers.get(storage, ()) if self.segment.kernels[p].stage is Stage.FORWARD]

    @cached_property
    def activations(self) -> set[int]:
        """Storages that are neither parameters nor tables."""
        fixed = (Role.PARAMETER, Role.BUFFER, Role.CONSTANT)
        return {t.storage for t in self.segment.tensors if t.role not in fixed}


@lru_cache(maxsize=1024)
def flow_of(form: Form) -> Flow:
    """Made once for segments of one form."""
    return Flow(form)


def recomputed(segment: RankSegment, mode: str, modules: Sequence[str] = (), *, early_stop: bool = False) -> Recomputed:
    """Choose what runs again.

    Args:
        mode: "none", "selective" or "full".
        modules: With "selective", parts instead of attention's core: ``core_attn``, ``layernorm``, ``act`` (or
            ``moe_act``), ``moe`` (routed experts), ``mla_up_proj``, ``op`` (torchtitan's choice by operation: all but
            attention, scatters and every other product), or names of modules.
        early_stop: Stop as soon as all is there that backward reads, as torch's checkpoint does; Megatron's runs the
            whole segment or part again.

    Raises:
        ConfigError: no such mode or module.
    """
    if mode == "none":
        return Recomputed((), segment.saved)
    places, kept_storages = _recomputed(segment.form, mode, tuple(modules), early_stop)
    return Recomputed(places, _tensors(segment, kept_storages))


def has_parts(segment: RankSegment, words: Iterable[str]) -> bool:
    """Whether each word of ``recomputed``'s ``modules`` names kernels of a segment's forward."""
    flow = flow_of(segment.form)
    return all(word == OPERATIONS or _kernels_of(flow, _ALIASES.get(word, word)) for word in words)


#: Kernels that run again, and storages that are kept.
_Again = tuple[tuple[int, ...], frozenset[int]]


@lru_cache(maxsize=4096)
def _recomputed(form: Form, mode: str, modules: tuple[str, ...], early_stop: bool) -> _Again:
    flow = flow_of(form)
    if mode == "full":
        kept_storages = _entering_storages(flow)
        places = _needed_again(flow, set(flow.forward), kept_storages) if early_stop else tuple(flow.forward)
        return places, frozenset(kept_storages)
    if mode != "selective":
        raise ConfigError(f"recompute: expected none, selective or full, got {mode!r}")
    words = [_ALIASES.get(word, word) for word in modules] or [CORE]
    if OPERATIONS in words:
        return _by_operation(flow)
    recomputed: set[int] = set()
    dropped: set[int] = set()
    for word in words:
        part = _part(flow, word)
        recomputed |= part
        dropped |= part if word in _DISCARDED else set()
    kept_storages = {s for s in flow.saved_storages if not _is_dropped(flow, s, recomputed, dropped)}
    places, stays = _selected(flow, recomputed, kept_storages)
    return (places if early_stop or not recomputed else _with_rings(flow, recomputed)), stays


def _is_dropped(flow: Flow, storage: int, again: set[int], dropped: set[int]) -> bool:
    """Whether a part made it, and nobody else keeps it."""
    makers = set(flow.makers_forward(storage))
    if not makers or not makers <= again:
        return False
    return makers <= dropped or flow.users_forward(storage) <= again


def _selected(flow: Flow, again: set[int], kept_storages: set[int]) -> _Again:
    kept_storages = kept_storages | _walk(flow, again, kept_storages)[1]
    return _needed_again(flow, again, kept_storages), frozenset(kept_storages)


def _entering_storages(flow: Flow) -> set[int]:
    """Storages of what enters a segment, or is given with the batch."""
    inputs = {t.storage for t in flow.segment.tensors if t.role is Role.INPUT}
    return set(flow.storages(flow.segment.enters)) | (inputs & set(flow.saved_storages))


def _tensors(segment: RankSegment, storages: frozenset[int]) -> tuple[int, ...]:
    """One local tensor of each, the largest."""
    largest: dict[int, int] = {}
    tensors = segment.tensors
    for place, tensor in enumerate(tensors):
        if tensor.storage in storages:
            best = largest.get(tensor.storage)
            if best is None or tensors[best].size_bytes < tensor.size_bytes:
                largest[tensor.storage] = place
    return tuple(sorted(largest.values()))


def _walk(flow: Flow, again: set[int], kept_storages: set[int]) -> tuple[set[int], set[int]]:
    """Kernels to run again for all that backward reads, and storages they need that ``again`` does not make."""
    todo = [s for s in flow.saved_storages if s not in kept_storages]
    places: set[int] = set()
    missing: set[int] = set()
    visited = set(todo)
    while todo:
        storage = todo.pop()
        makers = [place for place in flow.makers_forward(storage) if place in again]
        if not makers:
            missing.add(storage)
            continue
        for place in set(makers) - places:
            places.add(place)
            for source in flow.storages(flow.segment.kernels[place].inputs):
                if source in flow.activations and source not in kept_storages and source not in visited:
                    visited.add(source)
                    todo.append(source)
    return places, missing


def _needed_again(flow: Flow, again: set[int], kept_storages: set[int]) -> tuple[int, ...]:
    return _with_rings(flow, _walk(flow, again, kept_storages)[0])


def _with_rings(flow: Flow, places: set[int]) -> tuple[int, ...]:
    """Sort places of kernels, with the collectives by which keys and values meet again."""
    modules = {flow.segment.kernels[p].module for p in places if isinstance(flow.segment.kernels[p].detail, Attention)}
    return tuple(sorted(places | {p for p in flow.forward if _is_on(flow.segment.kernels[p], "cp", modules)}))


def _is_on(kernel: Kernel, axis: str, modules: set[str]) -> bool:
    return isinstance(kernel.detail, Collective) and kernel.detail.axis == axis and kernel.module in modules


def _by_operation(flow: Flow) -> _Again:
    kept_storages, products = _entering_storages(flow), 0
    recomputed = set(flow.forward)
    for place in flow.forward:
        kernel = flow.segment.kernels[place]
        keeps = isinstance(kernel.detail, Attention) or kernel.name == "reduce_scatter"
        if isinstance(kernel.detail, Product):
            products += 1
            keeps = products % 2 == 1
        if keeps:
            recomputed.discard(place)
            kept_storages.update(flow.storages(kernel.outputs))
    return _selected(flow, recomputed, kept_storages)


def _part(flow: Flow, word: str) -> set[int]:
    """Kernels of forward that a word stands for; a module must have some."""
    places = _kernels_of(flow, word)
    if not places and word not in (CORE, NORMS, ACTIVATIONS, UP_PROJECTIONS):
        parts = sorted({name for p in flow.forward for name in flow.segment.kernels[p].module.split(".") if name})
        words = ", ".join((CORE, NORMS, ACTIVATIONS, UP_PROJECTIONS, OPERATIONS, *parts))
        raise ConfigError(f"recompute: expected parts of segment {flow.segment.name!r} ({words}), got {word!r}")
    return places


def _kernels_of(flow: Flow, word: str) -> set[int]:
    kernels = flow.segment.kernels
    if word == CORE:
        return core_of_attention(flow)
    if word == NORMS:
        return {p for p in flow.forward if kernels[p].kind is OpKind.NORM}
    if word == ACTIVATIONS:
        return _activations(flow)
    if word == UP_PROJECTIONS:
        places = {p for p in flow.forward if kernels[p].module.rpartition(".")[2].endswith(("_b", "_up"))}
        places &= {p for p in flow.forward if isinstance(kernels[p].detail, Product)}
        return places | _before_attention(flow) if places else places
    return {p for p in flow.forward if word in kernels[p].module.split(".")}


def _activations(flow: Flow) -> set[int]:
    """Element by element, between products: all who use the result are such, or products."""
    kernels, places = flow.segment.kernels, set[int]()
    for place in reversed(flow.forward):
        users = {u for s in flow.storages(kernels[place].outputs) for u in flow.users_forward(s)}
        pure = all(u in places or isinstance(kernels[u].detail, Product) for u in users)
        if users and pure and kernels[place].kind in POINTWISE:
            places.add(place)
    return places


def _before_attention(flow: Flow) -> set[int]:
    """Rotations and copies whose results only attention reads: Megatron makes them again with the up-projections."""
    kernels, places = flow.segment.kernels, set[int]()
    for place in reversed(flow.forward):
        users = {u for s in flow.storages(kernels[place].outputs) for u in flow.users_forward(s)}
        pure = all(u in places or isinstance(kernels[u].detail, Attention) for u in users)
        if users and pure and kernels[place].kind in (*POINTWISE, OpKind.COPY):
            places.add(place)
    return places


def core_of_attention(flow: Flow) -> set[int]:
    """Fused attention; or from the product of queries and keys to the product with values."""
    kernels = flow.segment.kernels
    fused = {p for p in flow.forward if isinstance(kernels[p].detail, Attention)}
    if fused:
        return fused
    weights = {t.storage for t in flow.segment.tensors if t.role is Role.PARAMETER}
    products = [
        p
        for p in flow.forward
        if isinstance(kernels[p].detail, Product) and not weights & set(flow.storages(kernels[p].inputs))
    ]
    if not products:
        return set()
    below: set[int] = set()
    outputs: set[int] = set()
    for place in range(products[0], products[-1] + 1):
        if place in products or outputs & set(flow.storages(kernels[place].inputs)):
            below.add(place)
            outputs.update(flow.storages(kernels[place].outputs))
    return {p for p in below if p in products or _reaches(flow, p, products[-1])}


def _reaches(flow: Flow, place: int, target: int) -> bool:
    todo, visited = [place], {place}
    while todo:
        kernel_place = todo.pop()
        if kernel_place == target:
            return True
        for storage in flow.storages(flow.segment.kernels[kernel_place].outputs):
            new = {u for u in flow.users_forward(storage) if u <= target} - visited
            visited |= new
            todo.extend(new)
    return False

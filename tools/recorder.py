"""Recorder of what plain PyTorch does on one rank: products, collectives and live bytes, in the order issued.

Used as an oracle: a model is cut by torch itself under a fake process group (``torch.testing._internal.distributed``),
runs on small tensors whose values do not matter, and what this rank issued is compared with what Lading says.

>>> with Recorder({"dp": mesh.get_group()}) as recorder:
...     model(batch).backward()
>>> recorder.events
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Name of an operator, without its overload -> the collective that it is, and where its whole tensor stands: the larger
#: of input and output, or the input.
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allreduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


@dataclass(frozen=True, slots=True)
class Event:
    """One product or collective.

    Attributes:
        kind: "product", or the name of a collective as ``lading.ir.work.Collective`` has it.
        shape: Sizes (m, n, k) of a product, with the number of groups in front if there are more than one.
        size_bytes: Bytes of a collective's whole tensor.
        axis: Name of the group whose ranks take part.
        peer: Other rank of a send or a receive.
    """

    kind: str
    shape: tuple[int, ...] = ()
    size_bytes: int = 0
    axis: str = ""
    peer: int = -1


class Recorder(TorchDispatchMode):
    """Records products, collectives and live bytes of plain tensors; what DTensor tries on fake tensors is left out.

    Attributes:
        events: Products and collectives in the order issued.
        live_bytes, peak_bytes: Bytes now, and at most, of all storages seen so far that are alive.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], held: Iterable[torch.Tensor] = ()) -> None:
        """Name groups by axis.

        Args:
            held: Tensors that are alive before, to be counted.
        """
        super().__init__()
        self.events: list[Event] = []
        self.live_bytes = self.peak_bytes = 0
        self._axes: dict[str, str] = {group.group_name: axis for axis, group in groups.items()}
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_
        for tensor in held:
            self._hold(getattr(tensor, "_local_tensor", tensor))

    def __enter__(self) -> Recorder:
        resize, seen = self._resize, self._seen

        def resized(storage: torch.UntypedStorage, size: Any) -> torch.UntypedStorage:
            made = resize(storage, size)
            seen(storage)
            return made

        # FSDP2 frees and fills parameters this way, past any dispatch.
        cast("Any", torch.UntypedStorage).resize_ = resized
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        cast("Any", torch.UntypedStorage).resize_ = self._resize
        super().__exit__(*raised)

    @property
    def collectives(self) -> list[Event]:
        """Events between ranks, in order."""
        return [event for event in self.events if event.kind in {*_COLLECTIVES.values()}]

    @property
    def products(self) -> list[tuple[int, ...]]:
        """Shapes of the products, in order."""
        return [event.shape for event in self.events if event.kind == "product"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ in ("DTensor", "AsyncCollectiveTensor") for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, FakeTensor) for leaf in (*leaves, *tree_leaves(args))):
            return out
        for leaf in leaves:
            self._hold(leaf)
        base = func._schema.name.split("::")[1]
        if base in _PRODUCTS:
            self.events.append(Event("product", _product(base, args, leaves[0])))
        elif base in _COLLECTIVES:
            self.events.append(self._collective(base, args, kwargs or {}, leaves))
        return out

    def _collective(self, base: str, args: Any, kwargs: Any, made: list[torch.Tensor]) -> Event:
        values = [*args, *kwargs.values()]
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        if base == "all_to_all_single" and sum(map(bool, args[2])) == 1:  # each sends all to one: a ring
            base = "send"
        names = [self._axes[name] for name in map(_group_name, values) if name in self._axes]
        kind = _COLLECTIVES[base]
        if kind in ("send", "receive"):
            size, peer = sum(t.nbytes for t in tensors), next((v for v in values if isinstance(v, int)), -1)
            return Event(kind, size_bytes=size, axis=names[0] if names else "", peer=peer)
        first = tensors[:1] if kind == "all_to_all" and base == "all_to_all_single" else [*tensors, *made]
        return Event(kind, size_bytes=max(t.nbytes for t in first), axis=names[0] if names else "")

    def _hold(self, tensor: torch.Tensor) -> None:
        # What waits for a collective is a wrapper around its result: it has a storage in name only.
        if tensor.device.type != "meta" and not isinstance(tensor, AsyncCollectiveTensor):
            self._seen(tensor.untyped_storage())

    def _seen(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key).atexit = False
        self.live_bytes += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def _group_name(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):  # as c10d's operators take it
        return dist.ProcessGroup.unbox(value).group_name
    return ""


def _product(base: str, args: Any, made: torch.Tensor) -> tuple[int, ...]:
    if base == "_grouped_mm":
        a, b = args[:2]
        groups = b.shape[0] if b.dim() == 3 else made.shape[0]
        if b.dim() == 3:
            return (groups, -(-a.shape[0] // groups), made.shape[-1], a.shape[-1])
        return (groups, made.shape[-2], made.shape[-1], -(-a.shape[-1] // groups))
    a, b = args[-2:] if base in ("addmm", "baddbmm") else args[:2]
    if base in ("bmm", "baddbmm"):
        return (a.shape[0], a.shape[1], b.shape[2], a.shape[2])
    return (a.shape[0], b.shape[1], a.shape[1])

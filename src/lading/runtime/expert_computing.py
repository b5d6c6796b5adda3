"""Experts on the host: runs an expert's operations on the rows of the few tokens that chose it, where its values lie.

Each operation runs in the place of its action, which is left out on the device (``lading.memory.hosted_experts``): rows
of what it reads from there are gathered and copied to the host, once a step; its kernel is the CPU's, on views of as
many rows; and what others read is written back, row by row, into a tensor of zeros. The thread of the compute lane
does all that, and waits for each copy, so the device is idle meanwhile.

Legend: N tokens of the router, R tokens that chose the expert, W elements per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch

from lading.ir.action import DEVICE
from lading.ir.expert_rows import ExpertRows, row_dims
from lading.ir.experts import Expert
from lading.ir.graph import Tensor
from lading.ir.program import Program, whole_pages
from lading.ir.update_ops import PREFIX
from lading.memory.hosted_experts import (
    INDEX_BYTES,
    HostedExperts,
    host_bytes,
    is_kept,
    last_uses,
    room_bytes,
    updates_of,
)
from lading.optim.rule import ParameterRule
from lading.runtime.device import Call, DeviceDriver, Lane, Memory
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import bind, decode
from lading.runtime.tiers import HostBytes, TierBytes
from lading.runtime.update_kernels import Rate

if TYPE_CHECKING:
    from lading.runtime.values import Values  # which imports what binds actions, and that imports this file

#: Gives the bytes of a storage where it lies on the device at an action.
Located = Callable[[int], torch.Tensor]


class Waits(Protocol):
    """Waits for the lane on which rows are copied."""

    def wait(self) -> None:
        """Return once all that the lane was given has ended."""
        ...


@dataclass
class _Rows:
    """Expert in the step under way.

    Attributes:
        numbers: int64[R], tokens that chose it, in order.
        values: Elements of each storage on the host, until its last use: R rows of W elements, or all of what has no
            rows.
        done: Operations that have run.
    """

    numbers: torch.Tensor
    values: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    done: set[int] = field(default_factory=set[int])


class _KeptMemory:
    """Memory of gradients of weights on the host, kept for the next ones of their size.

    Memory that is touched for the first time costs more than the product of a few rows that goes there: 9.2 ms instead
    of 2.8 for 16 rows and 16 MiB (an AMD EPYC, one thread).
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Take a flat tensor of so many bytes, of any values."""
        free = self._free.get(size_bytes)
        memory = free.pop() if free else torch.empty(size_bytes, dtype=torch.uint8)
        return memory.view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Give back a tensor that was taken."""
        self._free.setdefault(tensor.nbytes, []).append(tensor.view(torch.uint8))


class HostRows:
    """Experts of one Program that the host computes in steps that give them few tokens.

    Args:
        hosted: From ``lading.memory.hosted_experts.find_hosted``, proven by ``check_hosted``.
        values: Values where they lie between steps.
        waits: Waits for the compute lane.

    Attributes:
        host_bytes: Bytes of the host's memory that it may take beside tiers.
        moved_bytes: Bytes of rows that were copied from the device and to it, by direction.
    """

    def __init__(
        self,
        program: Program,
        hosted: HostedExperts,
        tiers: Mapping[str, TierBytes],
        values: Values,
        optimizer: ParameterRule,
        device: DeviceDriver,
        waits: Waits,
    ) -> None:
        self.hosted, self._graph, self._optimizer, self._waits = hosted, program.graph, optimizer, waits
        self._memory, self._homes, self._values = ExitStack(), values.homes, values
        self._slots, self._tier = dict(program.slots.get(program.host_tier, ())), tiers.get(program.host_tier)
        self.host_bytes = host_bytes(program, hosted)
        size = room_bytes(program.graph, hosted)
        self._room, self._stage = device.arena(size), device.host(size)
        self._memory.callback(self._room.close)
        self._memory.callback(self._stage.close)
        self._dtypes = {t.storage: getattr(torch, t.dtype) for t in reversed(program.graph.tensors)}
        self._ends, self._kept = last_uses(program, hosted), _KeptMemory()
        self._step: dict[Expert, _Rows] = {}
        self._begun: dict[int, int] = {}  # updates that began, by a value that they change
        self._ended: dict[int, int] = {}
        self.moved_bytes = {"device_to_host": 0, "host_to_device": 0}

    @property
    def now(self) -> frozenset[Expert]:
        """Experts that the host computes in the step under way."""
        return frozenset(self._step)

    def close(self) -> None:
        """Give the memory through which rows pass back."""
        self._step.clear()
        self._kept = _KeptMemory()
        self._memory.close()

    def begin(self) -> None:
        """Begin a step: nothing is chosen yet."""
        self._step.clear()
        self._begun.clear()
        self._ended.clear()

    def choose(self, router: int, chosen: torch.Tensor, tokens: Mapping[Expert, int]) -> frozenset[Expert]:
        """Take note of what a router chose; returns the experts that the host is to compute.

        Args:
            chosen: Numbers of the chosen experts in host memory, of N tokens.
            tokens: Tokens of each expert that got some.
        """
        experts = self.hosted.chosen(tokens)
        for expert in experts:
            of_token = chosen.reshape(self.hosted.rows[expert].count, -1) == expert[1]
            self._step[expert] = _Rows(of_token.any(-1).nonzero().flatten())
        return experts

    def bound(self, action: int, op: int, located: Located, rate: Rate, lane: Lane) -> Call:
        """Make the call that does an action's operation on the host, where its expert is computed there.

        Args:
            located: Gives a storage's bytes on the device as this action finds them.
            rate: Numbers of the step's updates.
        """
        expert = self.hosted.by_action[action]
        rows = self.hosted.rows[expert]
        inputs = {s: self._rows_on_device(rows, s, located) for s in rows.inputs.get(op, ())}
        results = {s: self._rows_on_device(rows, s, located) for s in rows.results.get(op, ())}
        number, ends = self._number_of(op, located), self._ends.get(action, ())

        def run() -> None:
            step = self._step.get(expert)
            if step is None:
                return
            if op not in step.done:
                for storage, on_device in inputs.items():
                    step.values[storage] = self._gathered(on_device, storage in rows.widths, step.numbers, lane)
                if self._graph.ops[op].name.startswith(PREFIX):
                    self._update(op, rows, step, number, rate, lane)
                else:
                    self._compute(op, rows, step)
                step.done.add(op)
            for storage, on_device in results.items():
                self._scattered(on_device, step.values[storage], storage in rows.widths, step.numbers, lane)
            for storage in ends:
                value = step.values.pop(storage, None)
                if value is not None and is_kept(self._graph, rows, storage):
                    self._kept.give(value)

        return run

    # what lies where

    def _rows_on_device(self, rows: ExpertRows, storage: int, located: Located) -> torch.Tensor:
        """View of a storage on the device: [N, W], or [1] of a single number."""
        memory, dtype = located(storage), self._dtypes[storage]
        return memory.view(dtype).view(rows.count, -1) if storage in rows.widths else memory.view(dtype)[:1]

    def _number_of(self, op: int, located: Located) -> torch.Tensor | None:
        """Place on the device of the number of updates that an update reads or counts."""
        part = self._graph.ops[op]
        if not part.name.startswith(PREFIX):
            return None
        small = (self._graph.storage_of(t) for t in part.inputs if self._homes.get(self._graph.storage_of(t)) == DEVICE)
        storage = next(iter(small), None)
        return None if storage is None else located(storage).view(self._dtypes[storage])[:1]

    def _view(self, tensor: int, rows: ExpertRows, step: _Rows, number: torch.Tensor | None = None) -> torch.Tensor:
        """Tensor on the host: of an activation or a gradient the chosen rows, of a value all where it lies."""
        view = self._graph.tensors[tensor]
        if view.storage in step.values:
            flat = step.values[view.storage]
            return (
                _some_rows(flat, view, rows, len(step.numbers)) if view.storage in rows.widths else _all_of(flat, view)
            )
        if number is not None and self._homes.get(view.storage) == DEVICE:
            return _all_of(number, view)
        assert isinstance(self._tier, HostBytes), "the plan has its values in memory in which the host computes"
        size = self._graph.storages[view.storage].size_bytes
        return view_of(self._tier.bytes_at(self._slots[view.storage], size), view)

    # what runs

    def _compute(self, op: int, rows: ExpertRows, step: _Rows) -> None:
        part = self._graph.ops[op]
        made = [self._graph.storage_of(tensor) for tensor in part.outputs]
        if made and not part.mutates and all(is_kept(self._graph, rows, storage) for storage in made):
            for storage in made:
                step.values[storage] = self._kept.take(self._graph.storages[storage].size_bytes, self._dtypes[storage])
            bind(part, lambda t: self._view(t, rows, step), kind="cpu").run()
            return
        results = frozenset((*part.outputs, *(t for t in (part.results or ()) if t is not None)))
        call = decode(part, lambda t: None if t in results else self._view(t, rows, step))
        result = call.overload(*call.args, **call.kwargs)
        if part.mutates:
            return
        view = self._graph.tensors[part.outputs[0]]
        count = len(step.numbers) if view.storage in rows.widths else 0
        step.values[view.storage] = _elements(cast("torch.Tensor", result), view, rows, count)

    def _update(
        self, op: int, rows: ExpertRows, step: _Rows, number: torch.Tensor | None, rate: Rate, lane: Lane
    ) -> None:
        """Move a parameter where it lies, and count the update on the device."""
        part = self._graph.ops[op]
        on_host = None if number is None else self._gathered(number, False, step.numbers, lane)
        before = None if on_host is None else on_host.clone()
        parameter = self._graph.first_piece(self._graph.storage_of(part.inputs[0]))
        kernel = bind(
            part, lambda t: self._view(t, rows, step, on_host), kind="cpu", optimizer=self._optimizer, rate=rate,
            parameter=parameter,
        )  # fmt: skip
        changed = self._graph.op_writes[op]
        self._values.copied(changed)
        for storage in changed:
            self._begun[storage] = self._begun.get(storage, 0) + 1
        kernel.run()
        if number is not None and on_host is not None and not torch.equal(on_host, cast("torch.Tensor", before)):
            self._scattered(number, on_host, False, step.numbers, lane)
        for storage in changed:
            self._ended[storage] = self._ended.get(storage, 0) + 1

    def account(self) -> None:
        """Add what a step that stopped has changed on the host, or begun to, to what it has elsewhere."""
        whole = dict.fromkeys(self._begun, 0)
        for rows in (self.hosted.rows[e] for e in self._step):
            for op in updates_of(self._graph, rows):
                for storage in self._graph.op_writes[op]:
                    if storage in whole:
                        whole[storage] += 1
        lost = frozenset(s for s, count in self._begun.items() if self._ended.get(s, 0) < count)
        changed = {s: (count, whole[s]) for s, count in self._ended.items() if s not in lost}
        values = self._values
        values.changed, values.lost = {**values.changed, **changed}, values.lost | lost

    # copies

    def _rooms(self, dtype: torch.dtype, count: int, width: int) -> tuple[torch.Tensor, ...]:
        """Indices on the device and the host, and rows there: int64[R] twice, [R, W] twice."""
        index, size = count * INDEX_BYTES, count * width * dtype.itemsize
        start = whole_pages(index)
        memories = cast("tuple[Memory, Memory]", (self._room, self._stage))
        numbers = [memory.bytes_at(0, index).view(torch.int64) for memory in memories]
        values = [memory.bytes_at(start, size).view(dtype).view(count, width) for memory in memories]
        return (*numbers, *values)

    def _gathered(self, on_device: torch.Tensor, has_rows: bool, numbers: torch.Tensor, lane: Lane) -> torch.Tensor:
        """Elements of the chosen rows of a tensor of the device, or of a single number, on the host."""
        if not has_rows:
            stage = self._stage.bytes_at(0, on_device.nbytes).view(on_device.dtype)
            lane.bound(partial(stage.copy_, on_device, non_blocking=True))()
            self._waits.wait()
            self.moved_bytes["device_to_host"] += on_device.nbytes
            return stage.clone()
        count, width = len(numbers), on_device.shape[1]
        index, index_stage, room, stage = self._rooms(on_device.dtype, count, width)
        index_stage.copy_(numbers)

        def copy() -> None:
            index.copy_(index_stage, non_blocking=True)
            torch.index_select(on_device, 0, index, out=room)
            stage.copy_(room, non_blocking=True)

        lane.bound(copy)()
        self._waits.wait()
        self.moved_bytes["device_to_host"] += stage.nbytes
        return stage.flatten().clone()

    def _scattered(
        self, on_device: torch.Tensor, values: torch.Tensor, has_rows: bool, numbers: torch.Tensor, lane: Lane
    ) -> None:
        """Write the chosen rows of a tensor of the device, or a single number."""
        if not has_rows:
            stage = self._stage.bytes_at(0, on_device.nbytes).view(on_device.dtype)
            stage.copy_(values)
            lane.bound(partial(on_device.copy_, stage, non_blocking=True))()
            self._waits.wait()
            self.moved_bytes["host_to_device"] += on_device.nbytes
            return
        count, width = len(numbers), on_device.shape[1]
        index, index_stage, room, stage = self._rooms(on_device.dtype, count, width)
        index_stage.copy_(numbers)
        stage.copy_(values.view(count, width))

        def copy() -> None:
            index.copy_(index_stage, non_blocking=True)
            room.copy_(stage, non_blocking=True)
            on_device.index_copy_(0, index, room)

        lane.bound(copy)()
        self._waits.wait()
        self.moved_bytes["host_to_device"] += stage.nbytes


def _all_of(flat: torch.Tensor, view: Tensor) -> torch.Tensor:
    return flat.as_strided(view.shape, view.stride, view.offset)


def _rows_of(view: Tensor, rows: ExpertRows, count: int) -> tuple[int, ...]:
    """Shape of a view with fewer tokens, all in the innermost of its row dims."""
    dims = row_dims(view, rows.widths[view.storage], rows.count)
    assert dims, "the pass has found them"
    innermost = min(dims, key=lambda d: view.stride[d])
    return tuple(n if d not in dims else count if d == innermost else 1 for d, n in enumerate(view.shape))


def _some_rows(flat: torch.Tensor, view: Tensor, rows: ExpertRows, count: int) -> torch.Tensor:
    return flat.as_strided(_rows_of(view, rows, count), view.stride, view.offset)


def _elements(result: torch.Tensor, view: Tensor, rows: ExpertRows, count: int) -> torch.Tensor:
    """Elements of a result in the order in which its storage has them; no copy where they lie so."""
    shape = _rows_of(view, rows, count) if count else view.shape
    result = result.reshape(shape)
    expected = [(n, s) for n, s in zip(shape, view.stride, strict=True) if n != 1]
    if [(n, s) for n, s in zip(shape, result.stride(), strict=True) if n != 1] == expected:
        return result.as_strided((result.numel(),), (1,))
    flat = torch.empty(result.numel(), dtype=result.dtype)
    flat.as_strided(shape, view.stride).copy_(result)
    return flat

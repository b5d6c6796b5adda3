"""Values between steps: parameters, buffers, states and constants, read and written where they are at home."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from lading.errors import ConfigError, StorageError
from lading.ir.action import DEVICE
from lading.ir.graph import StepGraph, Tensor
from lading.ir.program import Program, slot_bytes
from lading.ir.sharding import units_of
from lading.ir.weight_pieces import piece_tensors
from lading.memory.tier_layout import Location, home_tiers
from lading.runtime.device import Memory
from lading.runtime.host_arena import Arena, view_of
from lading.runtime.interrupts import HeldInterrupts
from lading.runtime.shard_reads import ByteStream
from lading.runtime.tiers import HostBytes, TierBytes
from lading.units import MiB

#: Most of a storage that passes between a lower tier and the caller at once.
BOUNCE_BYTES = MiB


class Values:
    """Values that last from step to step, read and written while no step runs.

    Attributes:
        homes: Tier in which each storage lies between steps.
        changed: After a step that stopped: by storage, (changes of the step that its value has, changes of a whole
            step).
        lost: Storages whose value is gone, until it is written again.
        copied: Returns once values of the last step that are being copied may be changed, while steps go on.
    """

    def __init__(self, program: Program, arena: Memory, tiers: Mapping[str, TierBytes]) -> None:
        self.homes = home_tiers(program)
        self.changed: dict[int, tuple[int, int]] = {}
        self.lost: frozenset[int] = frozenset()
        self.copied: Callable[[Collection[int]], object] = len  # none are
        self._graph = program.graph
        self._places = {tier: dict(slots) for tier, slots in program.slots.items()} | {DEVICE: dict(program.resident)}
        self._arena, self._tiers, self._bounce = arena, tiers, Arena(BOUNCE_BYTES)
        self._views = named_tensors(program.graph)

    def close(self) -> None:
        """Give back the host memory that values pass through."""
        self._bounce.close()

    def discard(self) -> None:
        """Give back the host memory that values pass through, until it is used again."""
        self._bounce.discard()

    def poison(self) -> None:
        """Fill the arena with NaN, but for what is at home there, which becomes zeros."""
        self._arena.bytes_at(0, self._arena.size_bytes).fill_(0xFF)
        for storage, offset in self._places[DEVICE].items():
            self._arena.bytes_at(offset, slot_bytes(self._graph.storages[storage].size_bytes)).zero_()

    def write(self, storage: int, tensor: torch.Tensor) -> None:
        """Set a persistent storage from a tensor of its own shape and dtype, or from raw bytes (uint8, one dim).

        Raises:
            ConfigError: not persistent, or of another shape or dtype.
        """
        home = self._home(storage)
        source = self._as_bytes(storage, tensor)
        with HeldInterrupts():
            for start, end in _pieces(home, source.numel()):
                self._write_piece(home, start, source[start:end])
            self.changed.pop(storage, None)
            self.lost -= {storage}

    def write_part(self, storage: int, start: int, part: torch.Tensor, *, anew: bool = False) -> None:
        """Set the bytes of a persistent storage from byte ``start`` on (uint8, one dim); as ``Executor.write_part``."""
        home, end = self._home(storage) if anew else self._present(storage), start + part.numel()
        with HeldInterrupts():
            for begin, stop in _pieces(home, self._graph.storages[storage].size_bytes):
                low, high = max(begin, start), min(stop, end)
                if low >= high:
                    continue
                if home.tier == DEVICE:
                    self._write_piece(home, low, part[low - start : high - start])
                    continue
                room = self._bounce.bytes_at(0, stop - begin)  # a lower tier takes whole pages
                if (low, high) != (begin, stop):
                    self._tiers[home.tier].read(home.offset + begin, room)
                room[low - begin : high - begin] = part[low - start : high - start]
                self._tiers[home.tier].write(home.offset + begin, room)
            self.changed.pop(storage, None)
            self.lost -= {storage}

    def takes_chunks(self, storage: int) -> bool:
        """Whether a storage's bytes lie in the order of its tensor's elements, so that ``write_chunks`` can set it."""
        return lies_in_order(self._graph, self._views, storage)

    def write_chunks(self, storages: Sequence[int], chunks: Iterable[memoryview]) -> None:
        """Set persistent storages from bytes in the order of their elements; as ``Executor.write_chunks``."""
        source = ByteStream(chunks)
        for storage in storages:
            home, size = self._home(storage), self._graph.storages[storage].size_bytes
            with HeldInterrupts():
                for start in range(0, size, BOUNCE_BYTES):
                    room = self._bounce.bytes_at(0, min(BOUNCE_BYTES, size - start))
                    source.fill(room.numpy().data)
                    if home.tier == DEVICE:
                        self._arena.bytes_at(home.offset + start, room.numel()).copy_(room)
                    else:
                        self._tiers[home.tier].write(home.offset + start, room)
                self.changed.pop(storage, None)
                self.lost -= {storage}
        source.end()

    def read(self, storage: int) -> torch.Tensor:
        """Copy a persistent storage, in the shape of its parameter, buffer or state; as ``Executor.read_storage``."""
        home = self._present(storage)
        result = torch.empty(self._graph.storages[storage].size_bytes, dtype=torch.uint8, device="cpu")
        for start, end in _pieces(home, result.numel()):
            self._fetch(home, start, result[start:end])
        return view_of(result, self._views[storage]) if storage in self._views else result

    def read_part(self, storage: int, start: int, room: torch.Tensor) -> None:
        """Fill ``room`` (uint8, one dim) with the bytes of a storage from ``start`` on; it ``takes_chunks``."""
        home, size, end = self._present(storage), self._graph.storages[storage].size_bytes, start + room.numel()
        if home.tier == DEVICE:
            self._fetch(home, start, room)
            return
        for begin in range(start // BOUNCE_BYTES * BOUNCE_BYTES, end, BOUNCE_BYTES):
            piece = self._bounce.bytes_at(0, min(BOUNCE_BYTES, size - begin))  # a lower tier gives whole pages
            self._tiers[home.tier].read(home.offset + begin, piece)
            low, high = max(begin, start), min(begin + piece.numel(), end)
            room[low - start : high - start] = piece[low - begin : high - begin]

    def chunks(self, storage: int) -> Iterator[memoryview]:
        """Read the bytes of a persistent tensor in the order of its elements; as ``Executor.chunks``."""
        home, size = self._present(storage), self._graph.storages[storage].size_bytes
        if not self.takes_chunks(storage):
            value = self.read(storage).contiguous().flatten().view(torch.uint8)
            yield value.numpy().data
            return
        for start in range(0, size, BOUNCE_BYTES):
            count = min(BOUNCE_BYTES, size - start)
            if home.tier == DEVICE:
                piece = self._arena.bytes_at(home.offset + start, count)
            else:
                piece = self._bounce.bytes_at(0, count)
                self._tiers[home.tier].read(home.offset + start, piece)
            yield piece.cpu().numpy().data

    def is_in_memory(self, storage: int) -> bool:
        """Whether a storage lies between steps where its bytes can be addressed: on the device, or in host memory."""
        home = self._home(storage)
        return home.tier == DEVICE or isinstance(self._tiers[home.tier], HostBytes)

    def copy_out(self, storage: int, rooms: Sequence[torch.Tensor]) -> None:
        """Copy a storage that ``is_in_memory`` into places in host memory (uint8); one thread of the host does it.

        Raises:
            StorageError: the value is lost.
        """
        home, size = self._present(storage), self._graph.storages[storage].size_bytes
        memory = self._arena if home.tier == DEVICE else cast("HostBytes", self._tiers[home.tier])
        source = memory.bytes_at(home.offset, size)
        for room in rooms:
            if source.device.type == "cpu":
                np.copyto(room.numpy(), source.numpy())  # without the threads of torch's copy, which are a step's
            else:
                room.copy_(source)

    def lose(self, storages: frozenset[int]) -> None:
        """Count values as gone, until they are written again."""
        self.lost |= storages

    def at_home(self, storage: int, start: int, end: int) -> torch.Tensor | None:
        """Bytes ``start`` to ``end`` of a storage (uint8) in the arena; None where it lies in a lower tier."""
        home = self._present(storage)
        return self._arena.bytes_at(home.offset + start, end - start) if home.tier == DEVICE else None

    def read_pages(self, storage: int, start: int, room: torch.Tensor) -> None:
        """Fill ``room`` (uint8, whole pages) from byte ``start``, that of a page, of a storage in a lower tier."""
        home = self._present(storage)
        self._tiers[home.tier].read(home.offset + start, room)

    def write_pages(self, storage: int, start: int, room: torch.Tensor) -> None:
        """Inverse of ``read_pages``."""
        home = self._present(storage)
        self._tiers[home.tier].write(home.offset + start, room)

    def copy(self, storage: int, source: Location, target: Location) -> None:
        """Copy a storage from one place to another; neither need be where it lies between steps."""
        size = self._graph.storages[storage].size_bytes
        room = torch.empty(min(size, BOUNCE_BYTES), dtype=torch.uint8, device="cpu")
        for start in range(0, size, BOUNCE_BYTES):
            piece = room[: min(BOUNCE_BYTES, size - start)]
            self._fetch(source, start, piece)
            self._write_piece(target, start, piece)

    def write_constants(self, storages: Container[int]) -> None:
        """Write the graph's constants among the storages."""
        for index, storage in enumerate(self._graph.storages):
            if storage.data and index in storages:
                self.write(index, torch.frombuffer(bytearray(storage.data), dtype=torch.uint8))

    def _fetch(self, source: Location, start: int, piece: torch.Tensor) -> None:
        """Fill ``piece``, in host memory, from byte ``start`` of the storage at ``source``."""
        if source.tier == DEVICE:
            piece.copy_(self._arena.bytes_at(source.offset + start, piece.numel()))
            return
        room = self._bounce.bytes_at(0, piece.numel())
        self._tiers[source.tier].read(source.offset + start, room)
        piece.copy_(room)

    def _write_piece(self, target: Location, start: int, piece: torch.Tensor) -> None:
        """Inverse of ``_fetch``; ``piece`` may lie on the device."""
        if target.tier == DEVICE:
            self._arena.bytes_at(target.offset + start, piece.numel()).copy_(piece)
            return
        room = self._bounce.bytes_at(0, piece.numel())
        room.copy_(piece)
        self._tiers[target.tier].write(target.offset + start, room)

    def _home(self, storage: int) -> Location:
        if storage not in self.homes:
            raise ConfigError(
                f"storage {storage} holds no value between steps; only parameters, buffers, constants and states do"
            )
        tier = self.homes[storage]
        return Location(tier, self._places[tier][storage])

    def _present(self, storage: int) -> Location:
        """Location of a storage's value.

        Raises:
            StorageError: the value is lost.
        """
        if storage in self.lost:
            name = self._graph.storages[storage].name
            raise StorageError(f"the value of {name!r} was lost in a step that failed; load a checkpoint")
        return self._home(storage)

    def _as_bytes(self, storage: int, tensor: torch.Tensor) -> torch.Tensor:
        """Bytes that a storage must have to hold ``tensor``; no copy if it lies in memory as the graph wants it."""
        item = self._graph.storages[storage]
        actual = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if actual == ("uint8", (item.size_bytes,)):
            return tensor.detach()
        view = self._views.get(storage)
        if view is None or actual != (view.dtype, view.shape):
            shape = f"{view.dtype} {view.shape}" if view else f"uint8 ({item.size_bytes},)"
            raise ConfigError(f"expected {item.name!r} as {shape}, got {actual[0]} {actual[1]}")
        tensor = tensor.detach()
        if tensor.stride() == view.stride and view.is_dense and view.spans(item.size_bytes):
            return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
        copy = torch.zeros(item.size_bytes, dtype=torch.uint8, device="cpu")
        view_of(copy, view).copy_(tensor)
        return copy


def _pieces(home: Location, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges (start, end) of bytes that are copied at once: all, or as many as the host memory between takes."""
    step = max(1, size_bytes) if home.tier == DEVICE else BOUNCE_BYTES
    for start in range(0, size_bytes, step):
        yield start, min(start + step, size_bytes)


def lies_in_order(graph: StepGraph, views: Mapping[int, Tensor], storage: int) -> bool:
    """Whether the bytes of a storage are the elements of its parameter, buffer or state in order, and no others.

    Args:
        views: What ``named_tensors`` returns for the graph.
    """
    view = views.get(storage)
    return view is None or (view.is_row_major and view.spans(graph.storages[storage].size_bytes))


def named_tensors(graph: StepGraph) -> dict[int, Tensor]:
    """Tensor by which each parameter, buffer and state is known, by storage.

    Of a unit of sharded parameters it is its shard, of a piece of a parameter its elements, in one dim.
    """
    units = units_of(graph)
    ids = [p.tensor for p in graph.parameters if graph.storage_of(p.tensor) not in units]
    ids += [t for _, t in graph.buffers]
    ids += [part for state in graph.states for part in state.parts]
    ids += [unit.shard for unit in units.values() if not unit.lasts]
    return {view.storage: view for t in ids for view in piece_tensors(graph, t)}

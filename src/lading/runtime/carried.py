"""Values between two plans: what a trainer has while it is paused, in memory or in a file."""

from __future__ import annotations

import dataclasses
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lading.errors import ConfigError
from lading.files import cannot_write
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import FILE
from lading.ir.program import Program, whole_pages
from lading.runtime.executor import Executor
from lading.runtime.gathering import read_value
from lading.runtime.named import check_numbers
from lading.runtime.value_layout import Value, is_here

if TYPE_CHECKING:
    from lading.runtime.job import Replicas


def folder_beside(program: Program, folder: Path) -> Path | None:
    """Folder of the first disk that a Program has values on; None where it has none, as memory has room for them then.

    Args:
        folder: Folder of a tier without a location.
    """
    used = (tier for tier in program.tiers if tier.kind == FILE and program.tier_bytes(tier.name))
    return next((Path(tier.location or folder) for tier in used), None)


class CarriedValues:
    """Values on the way from one plan of a step to the next.

    Args:
        executor: Executor that has them.
        values: All values of the step.
        beside: Names of those that others take care of.
        ranks: Ranks that hold them together, all of which make this at the same time.
        folder: Folder of a file without a name that they lie in; None keeps them in ordinary memory.

    Attributes:
        tensors: Those that this rank brings along, by name: all where each rank has all, of a pipeline its own, and
            the numbers of all.

    Raises:
        StorageError: they could not be read, or the file could not be written; says what to change.
    """

    def __init__(
        self,
        executor: Executor,
        values: Mapping[str, Value],
        beside: Iterable[str],
        ranks: Replicas | None,
        folder: Path | None,
    ) -> None:
        left_out = {*beside}
        self._values = {name: value for name, value in values.items() if name not in left_out}
        self._sources = {} if ranks is None else {n: ranks.first_of(v.owner, v.owners) for n, v in self._values.items()}
        local_values = {n: value for n, value in self._values.items() if not value.shape or is_here(value, ranks)}
        large = {name for name, value in local_values.items() if value.shape and prod(value.shape)}
        sizes = [prod(local_values[name].shape) * DTYPE_BYTES[local_values[name].dtype] for name in large]
        self._file = None if folder is None else _NamelessFile(folder, sum(map(whole_pages, sizes)))
        self.tensors = dict[str, torch.Tensor]()
        for name, value in local_values.items():
            tensor = read_value(executor, dataclasses.replace(value, owner=None) if value.shape else value, ranks)
            self.tensors[name] = self._file.copy_to_file(tensor) if self._file is not None and name in large else tensor

    def check(self, values: Mapping[str, Value]) -> None:
        """Refuse a step that keeps other states of a parameter; it may keep none.

        Args:
            values: All values of the step by name.

        Raises:
            ConfigError: it does, or keeps one number of updates of parameters that had several; says which.
        """
        check_numbers(values, self.tensors)
        before, after = _suffixes(self._values), _suffixes(values)
        for name, states in before.items():
            if after.get(name, states) != states:
                raise ConfigError(
                    f"resume: expected a plan that keeps {', '.join(sorted(states))} of {name}, as before, found one "
                    f"that keeps {', '.join(sorted(after[name]))}; plan with the same optimizer and master_weights"
                )

    def spread(self, ranks: Replicas | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Give every rank each value in turn, whoever brought it.

        Args:
            ranks: Ranks that go on together: those that were before, in any layout.
        """
        for name, value in self._values.items():
            tensor = self.tensors.pop(name, None)
            if value.owner is not None and ranks is not None:
                tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype)) if tensor is None else tensor
                ranks.share(tensor, self._sources[name])
            assert tensor is not None, "a plan for one process is refused where there are several ranks"
            yield name, tensor
            if self._file is not None:
                self._file.drop()


class _NamelessFile:
    """Bytes of tensors in a file without a name, which is gone with the last of them.

    Args:
        size_bytes: Bytes of all of them, each in whole pages.

    Raises:
        StorageError: the folder has no room, or cannot be written.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))  # a full disk is an error now, no fault later
                self._pages = mmap.mmap(file.fileno(), max(1, size_bytes))
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._end = 0

    def copy_to_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor that takes memory only while it is looked at."""
        start, self._end = self._end, self._end + whole_pages(tensor.numel() * tensor.element_size())
        copy = torch.frombuffer(self._pages, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        copy.copy_(tensor)
        self.drop()
        return copy

    def drop(self) -> None:
        """Give back the memory of what was looked at."""
        self._pages.madvise(mmap.MADV_DONTNEED)


def _suffixes(names: Iterable[str]) -> dict[str, set[str]]:
    """Last parts of dotted names, by what stands before them."""
    suffixes: dict[str, set[str]] = {}
    for name in names:
        before, _, last = name.rpartition(".")
        suffixes.setdefault(before, set()).add(last)
    return suffixes

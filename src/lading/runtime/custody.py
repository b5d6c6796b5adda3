"""Custody: the tensors of a model whose values somebody else has for a while.

Such a tensor keeps its shape and dtype and has no memory. Its class is changed to one that answers what it is and
refuses everything that would look at its elements or change it: a forward, a state dict, a copy, a pickle, an
optimizer's step. (torch does the same for parameters that are not initialized yet: ``UninitializedParameter``.)
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lading.errors import ConfigError, StorageError
from lading.runtime.executor import Executor
from lading.runtime.gathering import read_value
from lading.runtime.interrupts import HeldInterrupts
from lading.runtime.named import first_few
from lading.runtime.resident import files_at, mapped_bytes
from lading.runtime.value_layout import Value

if TYPE_CHECKING:
    from lading.runtime.job import Replicas

_NAME, _REASON = "_lading_name", "_lading_reason"
#: Storages from this size on go back to the system when they are freed, so that it can be seen.
_MEASURED_BYTES = 8 << 20
_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "itemsize",
    "nbytes",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "_version",
    "is_cuda",
    "is_meta",
    "is_nested",
    "is_quantized",
    "is_sparse",
]
_METHODS = [
    "size",
    "numel",
    "nelement",
    "dim",
    "ndimension",
    "element_size",
    "is_floating_point",
    "is_complex",
    "get_device",
    "requires_grad_",
]
_FUNCTIONS = (torch.numel, torch.is_floating_point, torch.is_complex)
#: What a tensor without values still answers.
_ANSWERED = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        torch.Tensor.requires_grad.__set__,  # pyright: ignore[reportAttributeAccessIssue]
        *_FUNCTIONS,
    ]
)
_HELD = (
    "its values are with a lading.Trainer: read them with trainer.value(name) or trainer.state_dict(), change one with "
    "trainer.set_value(name, value), save them with trainer.save(folder), or close the trainer, which writes them back"
)


class _Held:
    """Class of a tensor while its values are elsewhere: it answers for shape and dtype, and refuses all use."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _ANSWERED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        tensor = next(iter(_held_among([*args, *(kwargs or {}).values()])), None)
        name = repr(vars(tensor)[_NAME]) if tensor is not None else "a parameter or buffer"
        reason = vars(tensor)[_REASON] if tensor is not None else _HELD
        called = getattr(function, "__name__", "an operation")
        request = "its elements or gradient" if called in ("__get__", "__set__") else called
        raise ConfigError(f"{name} was asked for {request}, but {reason}")

    def __repr__(self) -> str:
        return f"<{vars(self)[_NAME]}: its values are with a lading.Trainer>"


def is_held(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory was freed while ``Custody`` has its values: it must not be read directly."""
    return isinstance(tensor, _Held)


def _held_among(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, _Held):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _held_among(value)


@cache
def _held_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(kind.__name__, (_Held, kind), {})


class Custody:
    """Tensors whose values were taken; every one gets them back, or says that they are lost."""

    def __init__(self) -> None:
        self._taken: list[tuple[str, torch.Tensor, type[torch.Tensor], torch.device]] = []

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order in which they were taken."""
        return [name for name, *_ in self._taken]

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Free a tensor's memory; the caller has copied its value."""
        kind = type(tensor)
        self._taken.append((name, tensor, kind, tensor.device))
        with torch.inference_mode(False):
            tensor.data = _without_memory(tensor, tensor.device)
        vars(tensor).update({_NAME: name, _REASON: _HELD})
        tensor.__class__ = _held_class(kind)

    def take_again(self) -> None:
        """Free all memory that ``give_back`` gave, as if it had not been called: ``read`` still has the values."""
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for _, tensor, _, device in self._taken:
                tensor.data = _without_memory(tensor, device)
                vars(tensor)[_REASON] = _HELD

    def give_back(self, read: Callable[[str], torch.Tensor]) -> list[tuple[str, Exception]]:
        """Give every tensor its value, on the CPU.

        Returns:
            Pairs (name, error) of those that ``read`` could not give. Such a tensor goes on refusing to be used;
            ``release`` ends custody of the others, ``take_again`` of none.
        """
        lost: list[tuple[str, Exception]] = []
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            for name, tensor, *_ in self._taken:
                try:
                    tensor.data = _tried_twice(read, name)
                except Exception as error:
                    lost.append((name, error))
                    vars(tensor)[_REASON] = f"its value is lost: {error}"
        return lost

    def release(self, lost: Iterable[str]) -> None:
        """Make all but the lost ones ordinary tensors again, each on the device that it was on, if that has room."""
        lost_names, failures = set(lost), list[Exception]()
        entries, self._taken = self._taken, []
        for name, tensor, kind, device in entries:
            if name in lost_names:
                continue
            tensor.__class__ = kind
            vars(tensor).pop(_NAME, None)
            vars(tensor).pop(_REASON, None)
            if device.type != "cpu":
                try:
                    tensor.data = tensor.data.to(device)
                except RuntimeError as error:  # it stays on the CPU
                    failures.append(error)
        if failures:
            raise failures[0]


def _without_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Tensor of the shape of ``tensor`` whose elements are all one element in memory, on ``device``."""
    return torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class FreedBytes:
    """Counts what goes back to the system as tensors on one device are dropped, one after the other.

    A tensor's memory may outlive it: another tensor or array may have it too, or it lies in a file, which stays mapped
    as long as anything of it is there.

    Args:
        tensors: All tensors that will be dropped; none has been yet.
        now_bytes: Gives the memory of the device in use, in bytes.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], now_bytes: Callable[[], int]) -> None:
        self._now_bytes, self._dropped_bytes = now_bytes, 0
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        files = zip(on_host, files_at([t.data_ptr() for t in on_host]), strict=True) if on_host else ()
        self._files = {id(tensor): file for tensor, file in files if file is not None}
        self._mapped_bytes = mapped_bytes({*self._files.values()})
        self._small: dict[StorageWeakRef, int] = {}

    def drop(self, tensor: torch.Tensor, drop: Callable[[], None]) -> None:
        """Call ``drop``, which frees the tensor's memory, and count it."""
        storage = tensor.untyped_storage()
        size_bytes, small = storage.nbytes(), StorageWeakRef(storage)
        del storage
        before = self._now_bytes()
        drop()
        if id(tensor) in self._files:
            return
        if size_bytes >= _MEASURED_BYTES:
            self._dropped_bytes += min(size_bytes, max(0, before - self._now_bytes()))
        else:
            self._small[small] = size_bytes

    def total(self) -> int:
        """Bytes that went back; negative where more of a file lies in memory than before, and it is still mapped."""
        small = sum(size for storage, size in self._small.items() if storage.expired())
        return self._dropped_bytes + small + self._mapped_bytes - mapped_bytes({*self._files.values()})


def _tried_twice(read: Callable[[str], torch.Tensor], name: str) -> torch.Tensor:
    """Read a value, a second time if a handler of a signal raised in the first: that is not the value's fault."""
    try:
        return read(name)
    except Exception:
        return read(name)


def give_values_back(
    executor: Executor,
    custody: Custody,
    values: Mapping[str, Value],
    lock: AbstractContextManager[object],
    pid: int,
    ended: Callable[[], None] | None,
    replicas: Replicas | None,
) -> None:
    """Write the values back and close the executor; called by ``close``, or when nobody closed the trainer.

    Args:
        ended: Called once values are back.
        replicas: Other ranks, which have their shards of values and give them back, too.
    """
    if os.getpid() != pid:  # a forked process has the memory, but neither threads nor a claim to the files
        return
    with lock, HeldInterrupts():
        if executor.is_running:
            raise ConfigError(
                "expected no step under way, found one; raise an exception instead of closing inside of it"
            )
        if replicas is not None and any(values[name].is_shared for name in custody.names):
            replicas.meet("give the values back", {})
        lost = custody.give_back(lambda name: read_value(executor, values[name], replicas))
        later = [(name, e) for name, e in lost if not (_is_gone(e) or executor.lost & {*values[name].storages})]
        if later:
            custody.take_again()
            raise StorageError(
                f"{len(later)} values could not be written back ({first_few([name for name, _ in later])}): "
                f"{later[0][1]}; nothing is lost: free memory and close the trainer again, or save a checkpoint, which "
                "needs less"
            ) from later[0][1]
        try:
            executor.close()
        finally:
            custody.release(name for name, _ in lost)
            if ended is not None:
                ended()
    if lost:
        names = first_few([name for name, _ in lost])
        raise StorageError(f"{len(lost)} values could not be read and are lost ({names}): {lost[0][1]}") from lost[0][1]


def _is_gone(error: Exception) -> bool:
    """Whether what failed to read a value will fail again: a tier or a device did, and not for lack of memory."""
    return isinstance(error, (OSError, torch.AcceleratorError)) and getattr(error, "errno", None) != errno.ENOMEM

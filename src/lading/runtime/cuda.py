"""CUDA: the calls into ``torch.cuda`` that the executor makes. Nothing here decides anything."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from lading.errors import ConfigError, StorageError
from lading.runtime.accelerator import AcceleratorDevice, DeviceEvent
from lading.runtime.device import Call, CpuDevice, DeviceDriver
from lading.runtime.tiers import imported
from lading.units import MiB, format_bytes

#: Page-locked for every context of the process (cudaHostRegisterPortable).
_PORTABLE = 1
#: What a GPU has beside tensors may change by so many bytes before other processes' share is asked for again.
_CHANGED = 64 * MiB
_SMI_TIMEOUT_S = 10


def device_of(kind: str) -> DeviceDriver:
    """Driver of this host's device that a plan for ``kind`` runs on.

    Raises:
        ConfigError: there is none.
    """
    if kind == "cpu":
        return CpuDevice()
    if ":" in kind:
        return cast(Callable[[], DeviceDriver], imported(kind, "device"))()
    check_available(kind)
    return AcceleratorDevice(Cuda())


def check_available(kind: str) -> None:
    """Refuse a kind of device that this process cannot use.

    Raises:
        ConfigError: says what is missing.
    """
    if ":" in kind:
        imported(kind, "device")
        return
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return
    built = torch.version.cuda
    lack = "this PyTorch is built without CUDA" if built is None else f"PyTorch (CUDA {built}) finds no usable GPU"
    raise ConfigError(
        f"expected a {kind} device, found none: {lack}; the plan can be simulated here, "
        "or made for this host with: lading probe"
    )


def generator_state(kind: str) -> torch.Tensor:
    """State of the generator from which operations on a device draw random numbers, as uint8."""
    return torch.get_rng_state() if kind == "cpu" else torch.cuda.get_rng_state()


def set_generator_state(kind: str, state: torch.Tensor) -> None:
    """Inverse of ``generator_state``.

    Raises:
        StorageError: the state is of another kind of device.
    """
    expected_bytes = generator_state(kind).numel()
    if state.numel() != expected_bytes:
        raise StorageError(
            f"expected {expected_bytes} bytes of a {kind} generator's state, got {state.numel()}; the checkpoint is of "
            "a run on another kind of device: go on where it was saved"
        )
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state)


def _others_bytes(index: int) -> int:
    """Bytes that other processes take on a GPU; 0 where nvidia-smi does not say."""
    query = ["--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    try:
        command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties(index).uuid}", *query]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return bytes_of_others(listed, os.getpid())


def bytes_of_others(listed: str, own: int) -> int:
    """Bytes of processes but one in lines of "pid, MiB"; 0 where that one is not there, or a size is not said.

    In a container nvidia-smi lists other numbers of processes than the container's, or none.
    """
    rows = [tuple(map(str.strip, line.split(","))) for line in listed.splitlines() if line.strip()]
    if any(len(row) != 2 or not all(word.isdigit() for word in row) for row in rows):
        return 0
    sizes = {int(pid): int(size) * MiB for pid, size in rows}
    return sum(sizes.values()) - sizes[own] if own in sizes else 0


class CudaMeter:
    """Bytes that tensors take on the GPU, as the caching allocator counts them (``max_memory_allocated``)."""

    exact = True

    def __init__(self, index: int) -> None:
        self._index = index
        self.sample: Callable[[], int] | None = None
        self._asked: int | None = None
        self._others = 0

    def now_bytes(self) -> int:
        """Bytes that tensors take on the GPU now."""
        return torch.cuda.memory_allocated(self._index)

    def beside_bytes(self) -> int:
        """Bytes of the GPU that are neither free, nor the caching allocator's, nor others': its context and code.

        Other processes' bytes are those that nvidia-smi lists; where it does not list this one, theirs are counted.
        """
        free, total = torch.cuda.mem_get_info(self._index)
        used_bytes = total - free - torch.cuda.memory_reserved(self._index)
        if self._asked is None or abs(used_bytes - self._asked) > _CHANGED:
            self._asked, self._others = used_bytes, _others_bytes(self._index)
        return max(0, used_bytes - self._others)

    def reset(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def peak_bytes(self) -> int:
        """Highest bytes that tensors took on the GPU since the last reset."""
        return torch.cuda.max_memory_allocated(self._index)

    def close(self) -> None:
        """Do nothing: the allocator goes on counting."""


class Cuda:
    """Api of one GPU of this host.

    Args:
        index: Number of the GPU; None takes the current one.
    """

    kind = "cuda"

    def __init__(self, index: int | None = None) -> None:
        self.index = torch.cuda.current_device() if index is None else index
        self._target = torch.device("cuda", self.index)

    def zeros(self, size_bytes: int) -> torch.Tensor:
        """Allocate uint8[size_bytes] of zeros on the GPU.

        Raises:
            StorageError: the GPU has not that much to give.
        """
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self._target)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.index)
            raise StorageError(
                f"expected {format_bytes(size_bytes)} for the arena on {torch.cuda.get_device_name(self.index)}, found "
                f"{format_bytes(free)} of {format_bytes(total)} free; free some, or plan with a smaller budget"
            ) from error

    def pin(self, memory: torch.Tensor) -> Call:
        """Page-lock host memory where it lies, as torch's own comes in powers of two; returns the call that undoes it.

        Raises:
            StorageError: the system does not lock that much.
        """
        runtime: Any = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))
        if code:
            raise StorageError(
                f"cannot page-lock {format_bytes(memory.numel())} of host memory (CUDA error {code}); "
                "give the host tier less (the machine's tiers.host.capacity_bytes) or raise the memory limit"
            )
        address = memory.data_ptr()

        def unpin() -> None:
            runtime.cudaHostUnregister(address)

        return unpin

    def stream(self) -> torch.cuda.Stream:
        """Make a new stream of the GPU."""
        return torch.cuda.Stream(self._target)

    def current(self) -> torch.cuda.Stream:
        """Stream of the GPU that is current in this thread."""
        return torch.cuda.current_stream(self._target)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Context in which the stream, and its GPU, are current in this thread."""
        return torch.cuda.stream(stream)

    def launched(self, stream: Any, call: Callable[[], object]) -> Call:
        """Return ``call`` itself, which issues to the stream that its thread has entered."""
        return call

    def event(self) -> DeviceEvent:
        """Make a new event that keeps the time; a host that waits for it sleeps."""
        return torch.cuda.Event(enable_timing=True, blocking=True)

    def wait(self, stream: Any, event: Any) -> None:
        """Run what the stream is given from now on after the event."""
        stream.wait_event(event)

    def meter(self) -> CudaMeter:
        """Make a meter of the bytes that tensors take on the GPU."""
        return CudaMeter(self.index)

    def close(self) -> None:
        """Free the workspaces of products, of which cuBLAS keeps one for each stream and thread that ran some."""
        clear: Any = torch._C._cuda_clearCublasWorkspaces  # pyright: ignore[reportAttributeAccessIssue]
        clear()

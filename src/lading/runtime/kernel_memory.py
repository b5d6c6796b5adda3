"""Kernel memory: bytes that a CPU's libraries take beside a step's tensors, measured in a fresh process.

How much a library packs, compiles or copies for a kernel depends on the processor, the threads and the shapes, and no
library says it beforehand. So each distinct operation of a step runs once, in program order, in a process that has run
nothing else, on memory that is there. Two things are told apart:

    scratch   what an operation takes while it runs and gives back
    kept      what stays: code pages, thread pools, packing buffers, code compiled for a shape

A fresh process needs seconds to start, so what was measured is remembered in a file of the user's cache folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import mmap
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from lading import __version__
from lading.errors import StorageError
from lading.files import make_folder, write_aside
from lading.ir.graph import Op, OpKind, StepGraph
from lading.ir.update_ops import rule_of
from lading.optim.torch_update import TorchUpdate
from lading.runtime.host import host_id
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import View, workspace_of
from lading.runtime.resident import LARGEST_KEPT_BYTES, PeakMeter, give_back, resident_bytes, reuse_pages, trim
from lading.runtime.scratch import by_signature, extent, signature
from lading.runtime.workspace import runs_of

#: An operation with more bytes of tensors, or a product of more FLOP, is not run to measure it.
_LARGEST_BYTES, _LARGEST_FLOP = 2 << 30, 1e12
#: Operations up to this run so many times more where threads share them: which packs into whose buffer is chance.
_LIGHT_FLOP, _ROUNDS = 2e9, 3
#: Bounds of ``KernelMemory.heap_bytes``: below them it would be given back over and over.
_SMALLEST_HEAP_BYTES, _LARGEST_HEAP_BYTES = 1 << 20, 5 << 20
#: Measured on equal runs of nets with large scratch on two threads, torch 2.13: 24.1 MiB of scratch became 26.7 where
#: the pieces of a kernel did not fit the holes of the heap.
#: Equal processes on one thread kept and took up to 0.9 MiB more or less. Whose buffer a thread packs into is chance:
#: two threads kept up to 2.7 MiB more than the process that measured.
_SCRATCH_VARIES, _VARIES_BYTES, _VARIES_BYTES_PER_THREAD = 0.1, 1 << 20, 2 << 20
#: Variables of the environment that choose kernels, or an allocator.
_SETTINGS = ("ATEN_", "DNNL_", "GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
#: How the measuring process begins: with the folders that this one imports from, and no other.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); from lading.runtime.kernel_memory import main; main()"
)
_TIMEOUT_S = 600.0
_ALIGNMENT = 64


@dataclass(frozen=True)
class KernelMemory:
    """Memory of the host that the kernels of a step take beside its tensors.

    Attributes:
        scratch_bytes: Bytes of each operation while it runs, in program order.
        kept_bytes: Bytes that all of them together leave behind, once.
        unmeasured: Names of operations that were not run; their scratch is worked out from their shapes.
        threads: Compute threads it was measured with.
    """

    scratch_bytes: tuple[int, ...]
    kept_bytes: int
    unmeasured: tuple[str, ...] = ()
    threads: int = 1

    @property
    def heap_bytes(self) -> int:
        """Bytes of room for freed scratch that the allocator keeps, where pieces of different sizes lie side by side.

        Measured: 2.3 to 2.9 MiB for a GPT whose operations take 1.0, 0.6, 0.5 and 0.5, torch 2.13. Larger pieces go
        back at once; where one of them is more, it has that room, and the executor gives freed scratch back before it
        (``lading.runtime.resident.Ceiling``).
        """
        sizes = {size for size in self.scratch_bytes if size < LARGEST_KEPT_BYTES}
        return min(_LARGEST_HEAP_BYTES, max(_SMALLEST_HEAP_BYTES, sum(sizes)))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of room beside arena and kept memory: the largest scratch or the heap, and what equal runs vary by."""
        largest = max(self.scratch_bytes, default=0)
        varies = _VARIES_BYTES + _VARIES_BYTES_PER_THREAD * (self.threads - 1)
        return max(self.heap_bytes, largest + int(_SCRATCH_VARIES * largest)) + varies

    @property
    def spare_bytes(self) -> int:
        """Bytes of the workspace that some of equal runs take and others do not."""
        return self.workspace_bytes - max(self.heap_bytes, max(self.scratch_bytes, default=0))


def kernel_memory(graph: StepGraph, threads: int, *, cache: Path | None) -> KernelMemory:
    """Measure the kernels of a step on this host, or recall what was measured before.

    Args:
        graph: The whole step.
        threads: Compute threads of the run.
        cache: Folder of what was measured before; None measures now and remembers nothing.

    Raises:
        StorageError: the process that measures failed; its last words are in the message.
    """
    if cache is None:
        return _measured_apart(graph, threads)
    path = cache / f"{_key(graph, threads)}.json"
    if (recalled := _recalled(path, graph)) is not None:
        return recalled
    measured = _measured_apart(graph, threads)
    if not measured.unmeasured:  # what is not measured now may be later
        _remember(path, measured)
    return measured


def _key(graph: StepGraph, threads: int) -> str:
    """Hash of all that decides the numbers: host, libraries and their settings, Lading's kernels, operations in order.

    Kernels of updates are those of their rules, which need not be Lading's.
    """
    signatures: dict[object, int] = {}
    order = [signatures.setdefault(signature(graph, op), len(signatures)) for op in graph.ops]
    rules = {inspect.getfile(type(rule)) for op in graph.ops if (rule := rule_of(op)) is not None}
    folders = (Path(__file__).parent, Path(__file__).parent.with_name("optim"))
    files = {path for folder in folders for path in folder.glob("*.py")} | set(map(Path, rules))
    source = [path.read_bytes() for path in sorted(files)]
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(_SETTINGS))
    config = (__version__, source, settings, host_id(), torch.__version__, torch.__config__.show(), threads)
    return hashlib.sha256(repr((config, list(signatures), order)).encode()).hexdigest()[:24]


def _recalled(path: Path, graph: StepGraph) -> KernelMemory | None:
    """Read a measurement from its file; None where there is none, or it is not whole."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        measured = KernelMemory(
            tuple(saved["scratch_bytes"]), saved["kept_bytes"], tuple(saved["unmeasured"]), saved["threads"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = (*measured.scratch_bytes, measured.kept_bytes, measured.threads)
    is_complete = len(measured.scratch_bytes) == len(graph.ops) and all(type(n) is int and n >= 0 for n in numbers)
    return measured if is_complete else None


def _remember(path: Path, measured: KernelMemory) -> None:
    """Write the file whole or not at all; without a cache folder the next plan measures again."""
    with suppress(StorageError):
        make_folder(path.parent)
        with write_aside(path) as file:
            file.write(json.dumps(asdict(measured)).encode())


def _measured_apart(graph: StepGraph, threads: int) -> KernelMemory:
    folders = json.dumps([folder for folder in sys.path if isinstance(folder, str)])  # pyright: ignore[reportUnnecessaryIsInstance]
    command = [sys.executable, "-P", "-c", _START, str(threads), folders]
    try:
        process = subprocess.run(
            command, input=pickle.dumps(graph), capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        measurement = json.loads(process.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        words = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace").strip()
        raise StorageError(
            f"cannot measure the memory of this step's kernels in another process: {words.rpartition(chr(10))[2]}"
        ) from error
    worked_out = workspace_of(graph) if measurement["unmeasured"] else measurement["scratch_bytes"]
    pairs = zip(measurement["scratch_bytes"], worked_out, strict=True)
    scratch = tuple(estimate if measured is None else measured for measured, estimate in pairs)
    return KernelMemory(scratch, measurement["kept_bytes"], tuple(measurement["unmeasured"]), measurement["threads"])


def measure_here(graph: StepGraph) -> dict[str, Any]:
    """Run each distinct operation of a step once in this process, which should have run nothing else.

    Returns:
        The fields of KernelMemory; scratch of what cannot be run alone (too large, registered by the planning process
        only, or failing on zeros) is None.

    Raises:
        StorageError: the kernel does not let its memory mark be reset.
    """
    places = _Operands(graph)
    _start_autograd()
    _start_optimizer(graph)
    trim()
    reuse_pages()
    before, meter = resident_bytes(), PeakMeter()
    if not meter.exact:
        raise StorageError("expected /proc/self/clear_refs to be writable, to reset the kernel's memory mark")
    light, unmeasured = list[Op](), dict[str, None]()

    def scratch(op: Op) -> int | None:
        if not places.small_enough(op):
            unmeasured[op.name] = None
            return None
        try:
            scratch_bytes = max(_transient_bytes(run, meter) for run in runs_of(op, places.of(op), "cpu"))
        except Exception:  # an operation may raise anything; the caller says which were not measured
            unmeasured[op.name] = None
            return None
        if 0 < op.flops <= _LIGHT_FLOP:
            light.append(op)
        return scratch_bytes

    with torch.inference_mode():
        if (first := largest_product(graph)) is not None and places.small_enough(graph.ops[first]):
            runs_of(graph.ops[first], places.of(graph.ops[first]), "cpu")[0]()
        scratches = by_signature(graph, scratch)
        for op in light * (_ROUNDS if torch.get_num_threads() > 1 else 0):
            runs_of(op, places.of(op), "cpu")[0]()
    trim()
    meter.close()
    return {
        "scratch_bytes": scratches,
        "kept_bytes": max(0, resident_bytes() - before),
        "unmeasured": list(unmeasured),
        "threads": torch.get_num_threads(),
    }


def largest_product(graph: StepGraph) -> int | None:
    """Id of the operation whose operand takes most to pack; None in a step without products of float32 numbers.

    MKL keeps each buffer it has packed into and takes a new one for a product that fits none. An executor, and whoever
    measures for it, runs this operation before all others: then the rest fits the buffer that is there.
    """
    depths = [(_packed_elements(graph, op), index) for index, op in enumerate(graph.ops) if op.kind is OpKind.MATMUL]
    elements, index = max(depths, default=(0, 0))
    return index if elements else None


def _packed_elements(graph: StepGraph, op: Op) -> int:
    """Elements of a product's second operand that MKL packs at once. Measured, 2024.2: up to 768 rows of 16384."""
    operands = [graph.tensors[tensor] for tensor in op.inputs if len(graph.tensors[tensor].shape) >= 2]
    if len(operands) < 2 or operands[-1].dtype != "float32":
        return 0
    rows, columns = operands[-1].shape[-2:]
    return min(rows, 768) * min(columns, 16384)


def _start_autograd() -> None:
    """Load the code of autograd, as capturing a step does before a run begins: 6 MiB, in milliseconds."""
    x = torch.zeros(2, 2, requires_grad=True)
    turned = x.view(1, 2, 2).transpose(1, 2).flatten(1)
    spread = turned[:, :2].unsqueeze(0).expand(2, 1, 2).reshape(2, 2).t().contiguous()
    (spread * spread + spread).sum().backward()
    torch.cat([torch.empty_like(x).copy_(x), x]).detach()
    torch.stack([x, x]).chunk(2)


def _start_optimizer(graph: StepGraph) -> None:
    """Load what making an optimizer of torch loads, as its owner did before planning: torch's compiler, 72 MiB."""
    if any(isinstance(rule_of(op), TorchUpdate) for op in graph.ops):
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def _transient_bytes(run: Callable[[], object], meter: PeakMeter) -> int:
    """Bytes that one call takes only while it runs: its peak above what stays."""
    give_back()
    meter.reset()
    run()
    peak = meter.peak_bytes()
    give_back()
    return max(0, peak - meter.now_bytes())


class _Operands:
    """Memory for the tensors of one operation at a time.

    What is only read lies in pages that were never written, which the kernel backs with one page of zeros; what is
    written lies in pages touched beforehand. So neither shows in what an operation is seen to take.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        small = [op for op in graph.ops if self.small_enough(op)]
        self._read = _pages(max((self._bytes([tensor]) for op in small for tensor in op.inputs), default=0))
        self._written = _pages(max((self._bytes(_written(op)) for op in small), default=0))
        self._written.zero_()

    def small_enough(self, op: Op) -> bool:
        """Whether an operation can be run for its measure alone."""
        return op.flops <= _LARGEST_FLOP and self._bytes({*op.inputs, *_written(op)}) <= _LARGEST_BYTES

    def of(self, op: Op) -> View:
        """View that gives the tensors of an operation by id."""
        start, places = 0, dict[int, torch.Tensor]()
        for tensor in _written(op):
            size = self._bytes([tensor])
            places[tensor] = view_of(self._written[start : start + size], self.graph.tensors[tensor])
            start += size

        def view(tensor: int) -> torch.Tensor:
            if tensor not in places:
                places[tensor] = view_of(self._read[: self._bytes([tensor])], self.graph.tensors[tensor])
            return places[tensor]

        return view

    def _bytes(self, tensors: Iterable[int]) -> int:
        """Total bytes of tensors laid out one after another, each from an aligned place."""
        sized = (self.graph.tensors[tensor] for tensor in tensors)
        sizes = ((t.offset + max(1, extent(t))) * getattr(torch, t.dtype).itemsize for t in sized)
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)


def _written(op: Op) -> list[int]:
    """Tensors that an operation writes, each once."""
    return list(dict.fromkeys((*op.mutates, *(r for r in op.results if r is not None))))


def _pages(size_bytes: int) -> torch.Tensor:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # of a shared mapping a page that is read is one that is there
    return torch.frombuffer(mmap.mmap(-1, size_bytes + mmap.PAGESIZE, flags=private), dtype=torch.uint8)


def main() -> None:
    """Read a pickled StepGraph from standard input, measure with the threads asked for, and print JSON."""
    torch.set_num_threads(int(sys.argv[1]))
    graph = cast("StepGraph", pickle.load(sys.stdin.buffer))
    print(json.dumps(measure_here(graph)))

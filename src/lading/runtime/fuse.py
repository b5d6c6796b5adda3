"""Fusing: regions of a Program, compiled by Inductor into calls that write into the arena.

A region's operations become an FX graph whose last nodes copy what is kept into buffers that the caller hands in;
Inductor fuses those copies into the loops that make the values. Products, attention and whatever else is a library's
stay as they are bound. Regions with one signature are compiled once, so a block that repeats is compiled once. Sums are
added in another order and products may be contracted, so results are close to eager's, not equal to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES, StepGraph, Tensor
from lading.ir.program import Program
from lading.runtime.kernel_calls import decode
from lading.runtime.regions import Derivation, FusibleRegion, RegionFinder, Site, derivation

#: Lines of the code that Inductor writes: memory it takes, and calls into libraries, whose memory it does not show.
_ALLOCATION = re.compile(r"= empty_strided_\w+\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")
_LIBRARY = re.compile(r"^ +(?:buf\d+ = )?(?:extern_kernels|torch\.ops|aten)\.", re.MULTILINE)
_UNKNOWN = 1 << 62


@dataclass(frozen=True)
class Compiled:
    """A compiled region: ``function`` takes a list of inputs and outputs; ``scratch_bytes`` is what it allocates."""

    function: Callable[[list[torch.Tensor]], object]
    scratch_bytes: int


@dataclass(frozen=True)
class Fused:
    """Region with the compiled function that runs it."""

    region: FusibleRegion
    compiled: Compiled

    def bind(self, view: Callable[[Site], torch.Tensor]) -> Callable[[], object]:
        """Bind the function to the tensors at the region's places."""
        tensors = tuple(view(place) for place in (*self.region.inputs, *self.region.outputs))
        function = self.compiled.function
        return lambda: function([*tensors])  # the function empties its list


def fuse(program: Program, kind: str = "cpu") -> list[Fused]:
    """Compile the regions of a Program; those that need more scratch than the plan has room for are cut smaller.

    Args:
        kind: Kind of the device that will run them.

    Raises:
        ConfigError: no working C++ compiler, or not a CPU.
    """
    if kind != "cpu":
        raise ConfigError(f"compiled regions run on a CPU, this device is {kind!r}; set optimization.compile = false")
    finder = RegionFinder(program)
    waiting = finder.longest()[::-1]
    compiled: dict[tuple[object, ...], Compiled] = {}
    fused: list[Fused] = []
    while waiting:
        region = waiting.pop()
        if region.signature not in compiled:
            compiled[region.signature] = compile_region(program.graph, region)
        if compiled[region.signature].scratch_bytes <= program.workspace_bytes:
            fused.append(Fused(region, compiled[region.signature]))
        else:
            waiting.extend(finder.halves(region)[::-1])
    return fused


def compile_region(graph: StepGraph, region: FusibleRegion) -> Compiled:
    """Compile one region by Inductor; what an earlier process compiled comes from Inductor's own cache.

    Raises:
        ConfigError: no working C++ compiler.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode():
        fakes = [_fake(graph.tensors[p.tensor]) for p in (*region.inputs, *region.outputs)]
        traced = make_fx(partial(run_region, graph, region), decomposition_table=select_decomp_table())(*fakes)
    try:
        with config.patch(size_asserts=False, alignment_asserts=False, nan_asserts=False):
            inductor_code: Any = compile_fx_inner(traced, fakes)
    except (InductorError, InvalidCxxCompiler, CppCompileError) as error:
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, (InvalidCxxCompiler, CppCompileError)):
            raise
        raise ConfigError(
            f"compiled regions need a C++ compiler; install g++, or set optimization.compile = false: {cause}"
        ) from error
    return Compiled(inductor_code.current_callable, scratch_of(inductor_code.source_code))


def _fake(tensor: Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype))


def run_region(graph: StepGraph, region: FusibleRegion, *tensors: torch.Tensor) -> tuple[()]:
    """Run a region eagerly on its inputs and outputs: this is traced to compile it, and is the reference in tests.

    Args:
        tensors: The region's inputs, then the tensors that its outputs are written to.
    """
    inputs = {place.tensor: value for place, value in zip(region.inputs, tensors, strict=False)}
    results: dict[int, tuple[Tensor, torch.Tensor]] = {}

    def view(tensor: int) -> torch.Tensor | None:
        target = graph.tensors[tensor]
        if target.storage not in results:
            return inputs.get(tensor)
        base, value = results[target.storage]
        steps = derivation(base, target)
        assert steps is not None  # else the region would have ended before
        return derived(value, steps)

    for element in region.elements:
        if element.op is None:
            continue
        call = decode(element.op, view)
        result: Any = call.overload(*call.args, **call.kwargs)
        for tensor, value in zip(element.op.results, result if isinstance(result, tuple) else (result,), strict=True):
            assert tensor is not None  # else the operation would not be fusible
            results[graph.storage_of(tensor)] = (graph.tensors[tensor], value)
    for place, out in zip(region.outputs, tensors[len(region.inputs) :], strict=True):
        out.copy_(results[graph.storage_of(place.tensor)][1])
    return ()


def derived(value: torch.Tensor, how: Derivation) -> torch.Tensor:
    """Derive a view as ``how`` says, from the value that covers its storage."""
    x = value.permute(how.order).reshape(how.dims)
    if how.column is not None:
        x = x.select(-1, how.column)
    for dim, (start, end) in enumerate(how.cuts):
        x = x if (start, end) == (0, x.shape[dim]) else x.narrow(dim, start, end - start)
    return x.permute(how.turn).reshape(how.ones).expand(how.shape)


def scratch_of(source: str) -> int:
    """Largest bytes that compiled code allocates beside its arguments, told from its source."""
    if _LIBRARY.search(source):
        return _UNKNOWN
    rows = ((shape.replace(" ", ""), dtype) for shape, dtype in _ALLOCATION.findall(source))
    return sum(prod(int(n) for n in shape.split(",") if n) * DTYPE_BYTES[dtype] for shape, dtype in rows)

"""Regions: found where they may be, the same numbers as one call each, and compiled once per distinct block."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.cases import (
    OPTIMIZER,
    assert_equals_eager,
    at_random,
    batches_of,
    eager_run,
    graph_of,
    load,
    model_of,
    program_of,
)

from lading.errors import ConfigError
from lading.ir.graph import StepGraph, Tensor
from lading.ir.program import Program
from lading.ir.timeline import Timeline
from lading.report.snapshot import snapshot
from lading.runtime import fuse, regions
from lading.runtime.executor import Executor
from lading.runtime.fuse import Compiled, compile_region, run_region
from lading.runtime.regions import FusibleRegion, RegionFinder, derivation

RATES = [1e-3, 2e-3]
#: Inductor's own imports use what torch has deprecated.
inductor_imports = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def small_regions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LEAST_BYTES", 1)


def stand_in(graph: StepGraph, region: FusibleRegion) -> Compiled:
    """A region without a compiler: its places are spoiled first, as fused loops may write while they read."""

    def function(tensors: list[torch.Tensor]) -> None:
        for out in tensors[len(region.inputs) :]:
            out.fill_(float("nan") if out.is_floating_point() else -1)
        run_region(graph, region, *tensors)

    return Compiled(function, 64 * len(region.actions))


def steps(program: Program, folder: Path, name: str, *, micro: int = 1, clip: float = 0.0, **settings: object) -> None:
    """Two fused steps equal plain PyTorch's bit for bit."""
    with Executor(program, optimizer=OPTIMIZER, folder=folder, fuse=True, **settings) as executor:  # type: ignore[arg-type]
        assert_equals_eager(executor, name, micro=micro, clip=clip, rates=RATES)
        check_times(program, executor.timeline())


def check_times(program: Program, timeline: Timeline) -> None:
    """On each stream one action after another; nothing is freed before it was placed."""
    times = {event.action: event for event in timeline.events}
    ended: dict[str, float] = {}
    for action in program.actions:
        event = times[action.id]
        assert ended.get(action.stream, 0.0) <= event.start_s + 1e-9
        assert event.start_s <= event.end_s
        ended[action.stream] = event.end_s
    snapshot(program, timeline)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "micro", "clip", "seed"),
    [("gpt", 1, 0.0, None), ("gpt", 1, 0.0, 0), ("llama", 2, 0.5, 0), ("llama", 1, 0.0, 1), ("moe", 1, 0.0, 1)],
)
def test_each_as_one_call_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, micro: int, clip: float, seed: int | None
) -> None:
    """Packed addresses are used again at once, so a place written too early, or a value read too late, shows."""
    monkeypatch.setattr(fuse, "compile_region", stand_in)
    graph = graph_of(name, micro=micro, clip=clip)
    program = program_of(graph, None if seed is None else at_random(seed))
    assert len(RegionFinder(program).longest()) >= 4
    steps(program, tmp_path, name, micro=micro, clip=clip, poison=True)


def test_streams_that_sleep_do_not_change_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "compile_region", stand_in)
    sleeper = random.Random(0)

    def jitter(action: object) -> None:
        if sleeper.random() < 0.05:
            time.sleep(sleeper.random() * 2e-3)

    program = program_of(graph_of("gpt", micro=2, clip=1.0), at_random(1))
    steps(program, tmp_path, "gpt", micro=2, clip=1.0, poison=True, jitter=jitter)


def test_regions_that_need_too_much_scratch_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("llama")
    program = program_of(graph)
    asked: list[int] = []

    def greedy(graph: StepGraph, region: FusibleRegion) -> Compiled:
        made = stand_in(graph, region)
        asked.append(len(region.actions))
        return Compiled(made.function, program.workspace_bytes + len(region.actions) - 3)

    monkeypatch.setattr(fuse, "compile_region", greedy)
    assert {len(f.region.actions) for f in fuse.fuse(program)} == {2, 3}
    assert max(asked) > 6
    steps(program, tmp_path, "llama")


def test_no_place_is_written_that_is_read() -> None:
    for seed in range(3):
        program = program_of(graph_of("llama"), at_random(seed))
        sizes, tensors = program.graph.storages, program.graph.tensors
        for region in RegionFinder(program).longest():
            for out in region.outputs:
                end = out.offset + sizes[tensors[out.tensor].storage].size_bytes
                for read in region.inputs:
                    read_end = read.offset + sizes[tensors[read.tensor].storage].size_bytes
                    assert out.offset >= read_end or read.offset >= end


def test_a_block_that_repeats_is_compiled_once() -> None:
    """What differs between two depths is how often a signature comes, not how many there are."""
    sizes = {"dim": 128, "max_seq_len": 16}
    few, many = (
        {r.signature for r in RegionFinder(program_of(graph_of("llama", num_layers=n, **sizes))).longest()}
        for n in (3, 6)
    )
    assert len(few) == len(many) > 3


@given(st.data())
def test_a_view_is_derived_from_the_tensor_that_covers_its_storage(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    value = torch.arange(torch.Size(shape).numel()).view(shape).permute(order)
    base = Tensor(0, "int64", tuple(value.shape), value.stride())
    wanted = value
    for _ in range(data.draw(st.integers(0, 3))):
        wanted = data.draw(st.sampled_from([turned, narrowed, selected, widened, flat]))(wanted, data)
    view = Tensor(0, "int64", tuple(wanted.shape), wanted.stride(), wanted.storage_offset())
    how = derivation(base, view)
    if how is not None:
        assert torch.equal(fuse.derived(value.contiguous(), how), wanted)
    else:
        assert wanted.numel() == 0 or any(s not in (0, 1) for s in wanted.stride())


def turned(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    return x.permute(data.draw(st.permutations(range(x.dim()))))


def narrowed(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    if not x.dim():
        return x
    dim = data.draw(st.integers(0, x.dim() - 1))
    start = data.draw(st.integers(0, x.shape[dim] - 1))
    return x.narrow(dim, start, data.draw(st.integers(1, x.shape[dim] - start)))


def selected(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    return x.select(0, data.draw(st.integers(0, x.shape[0] - 1))) if x.dim() else x


def widened(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    return x.unsqueeze(0).expand(data.draw(st.integers(1, 3)), *x.shape)


def flat(x: torch.Tensor, data: st.DataObject) -> torch.Tensor:
    return x.view(-1) if x.is_contiguous() else x


def test_every_head_and_half_of_a_product_is_derived() -> None:
    """The views that attention takes of what one product made."""
    x = torch.randn(2, 16, 3 * 64)
    base = Tensor(0, "float32", tuple(x.shape), x.stride())
    for part in x.chunk(3, dim=-1):
        heads = part.unflatten(2, (4, -1)).transpose(1, 2)
        for view in (part, heads, heads[..., :8], heads[..., 8:]):
            how = derivation(base, Tensor(0, "float32", tuple(view.shape), view.stride(), view.storage_offset()))
            assert how is not None
            assert torch.equal(fuse.derived(x, how), view)


def test_bytes_are_no_numbers() -> None:
    assert derivation(Tensor(0, "float32", (4,), (1,)), Tensor(0, "int32", (4,), (1,))) is None


def test_scratch_is_read_from_what_the_compiler_wrote() -> None:
    code = "        buf0 = empty_strided_cpu((1024, 1), (1, 1024), torch.float32)\n        cpp_fused_0(x_1, buf0)\n"
    assert fuse.scratch_of(code) == 4096
    assert fuse.scratch_of(code + "        buf1 = empty_strided_cpu((3, ), (1, ), torch.int64)\n") == 4096 + 24
    assert fuse.scratch_of(code + "        extern_kernels.mm(x_1, y_1, out=buf0)\n") > 1 << 60


@pytest.mark.long
@inductor_imports
def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    program = program_of(graph_of("gpt", dim=68))
    region = RegionFinder(program).longest()[0]
    with config.patch({"cpp.cxx": ("/no/such/compiler",)}), pytest.raises(ConfigError, match=r"install g\+\+"):
        compile_region(program.graph, region)


def test_only_a_cpu_compiles() -> None:
    with pytest.raises(ConfigError, match="CPU"):
        fuse.fuse(program_of(graph_of("gpt")), "cuda")


@pytest.mark.slow
@inductor_imports
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_compiled_steps_are_close_to_plain_pytorch(tmp_path: Path, name: str) -> None:
    """Sums are added in another order: errors of some units of the last place of a float32 sum, 2e-5 relative."""
    program = program_of(graph_of(name))
    batches, reference = batches_of(len(RATES), 1), model_of(name)
    losses = eager_run(reference, batches, RATES, 0.0)
    with Executor(program, optimizer=OPTIMIZER, folder=tmp_path, fuse=True) as executor:
        load(executor, model_of(name))
        found = [executor.step(b, lr=lr) for b, lr in zip(batches, RATES, strict=True)]
        assert torch.allclose(torch.tensor(found), torch.tensor(losses), rtol=2e-5)
        for parameter in program.graph.parameters:
            value = executor.read_storage(program.graph.storage_of(parameter.tensor))
            wanted = dict(reference.named_parameters(remove_duplicate=False))[parameter.names[0]]
            # AdamW's first steps divide by the gradient's own size: a gradient that is all rounding may turn its sign
            assert (value - wanted).abs().mean() < 1e-2 * RATES[0]

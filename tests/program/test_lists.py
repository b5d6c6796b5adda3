"""Lists of ranks: what is emitted can be read back, holds what it must, and lasts what can be worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs import chain, offloaded

from lading.errors import ProgramError, SimulationError
from lading.ir.action import ActionKind, Work
from lading.ir.program import NETWORK, ActionList, ParameterGroup, Program, Region, parse_program
from lading.ir.schedules import KINDS, V_SHAPED, schedule
from lading.memory.verify import verify
from lading.program.emit import BEGIN, END, RUN, ListShape, UnitShape, emit
from lading.sim.device_step import simulate
from lading.sim.rank_engine import Priced, RankTimes, action_seconds, run_ranks

WHOLE = (((BEGIN, 0, 0), (RUN, 0, 1), (END, 0, 0)),) * 4
ONE = UnitShape(("dp",), WHOLE)
LAST = ONE._replace(ends=True)
#: A block whose experts are a group of their own between two runs of kernels.
EXPERTS = UnitShape(
    ("dp", "dp/ep"),
    (((BEGIN, 0, 0), (RUN, 0, 2), (BEGIN, 1, 0), (RUN, 2, 3), (END, 1, 0), (RUN, 3, 4), (END, 0, 0)),) * 4,
)


def shape(
    units: int, shards: str = "parameters", *, micro_batches: int = 1, more: int = 0, **others: object
) -> ListShape:
    """A rank without a pipeline whose units are alike, but that the last one stays gathered until backward."""
    runs = ((ONE, units - 1), (LAST, 1)) if units > 1 else ((LAST, 1),)
    plan = schedule("1f1b", 1, 1, micro_batches)
    return ListShape(plan, (runs,), shards=shards, num_repeats=more, **others)  # pyright: ignore[reportArgumentType]


def pipeline(kind: str, shards: str, *, units: int = 2, micro_batches: int = 8, unit: UnitShape = ONE) -> ListShape:
    """Four ranks of equal stages."""
    chunks = 2 if kind in (*V_SHAPED, "interleaved") else 1
    plan = schedule(kind, 4, chunks, micro_batches)
    return ListShape(plan, (((unit, units),),) * plan.stages, shards=shards, pipelined=True)


@pytest.mark.parametrize(("kind", "chunks"), [*((kind, 0) for kind in KINDS), ("interleaved", 5), ("zero-bubble", 5)])
@pytest.mark.parametrize("shards", ["", "optimizer", "parameters"])
@pytest.mark.parametrize("overlap", [True, False])
def test_rows_that_are_alike_are_written_as_one_by_one(
    kind: str, chunks: int, shards: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dataclasses.replace(pipeline(kind, shards, micro_batches=16), overlap_send=overlap, overlap_gather=overlap)
    if chunks:  # of which three are gathered at once
        plan = schedule(kind, 4, chunks, 16)
        asked = dataclasses.replace(asked, plan=plan, stages=asked.stages[:1] * plan.stages)
    monkeypatch.setattr("lading.program.emit._FEW_ROWS", 1)
    at_once = emit.__wrapped__(asked)
    monkeypatch.setattr("lading.program.emit._FEW_ROWS", 1 << 30)
    one_by_one = emit.__wrapped__(asked)
    assert at_once.ranks == one_by_one.ranks
    for name in ("regions", "storages", "uses"):
        assert getattr(at_once, name) == getattr(one_by_one, name)


def timed(
    program: Program,
    unshard: float | Callable[[ParameterGroup], float],
    reduce: float,
    forward: float,
    backward: float,
    slowdown: float = 0.0,
) -> RankTimes:
    def seconds(key: Priced) -> float:
        kind, what, _ = key
        if isinstance(what, Region):
            return forward if what.work is Work.FORWARD else backward
        if kind is ActionKind.UNSHARD and isinstance(what, ParameterGroup):
            return unshard(what) if callable(unshard) else unshard
        return reduce if kind is ActionKind.REDUCE_GRAD else 0.0

    return run_ranks(program, action_seconds(program, seconds), [slowdown] * len(program.ranks))


def test_computing_hides_all_but_the_ends() -> None:
    assert timed(emit(shape(10)), 1, 1, 2, 4).step_s == pytest.approx(10 * 2 + 10 * 4 + 1 + 1)


def test_a_slow_network_is_what_lasts() -> None:
    """Forward waits for ten gathers; backward for nine more and ten reductions, its first unit being there."""
    assert timed(emit(shape(10)), 30, 30, 2, 4).step_s == pytest.approx(10 * 30 + 2 + 4 + 9 * 30 + 10 * 30, abs=6)


def test_what_is_gathered_ahead_for_no_backward_is_resharded_when_backward_ends() -> None:
    """The first unit is frozen: each micro-batch gathers it in forward, and ahead in backward, which never uses it."""
    frozen = ONE._replace(passes=(WHOLE[0], (), (), ()))
    listed = dataclasses.replace(shape(3, micro_batches=2), stages=(((frozen, 1), (ONE, 1), (LAST, 1)),))
    program = emit(listed)
    verify(program)
    (actions,) = program.ranks
    first = program.storages.index(ParameterGroup(0, 0, "dp"))
    kinds = [kind for kind, storage in zip(actions.kind, actions.storage, strict=True) if storage == first]
    assert kinds == [ActionKind.UNSHARD, ActionKind.RESHARD] * 4


def test_computing_loses_what_gathers_and_reductions_beside_it_take() -> None:
    """A second of network beside computing costs a third of a second where computing takes 1.5 times as long."""
    beside = 9 + 9 + 9  # gathers in forward, in backward, reductions: all but the first and the last
    step_s = timed(emit(shape(10)), 1, 1, 2, 4, 0.5).step_s
    assert step_s == pytest.approx(1 + 10 * 2 + 10 * 4 + beside / 3 + 1)


def test_computing_within_one_gather_is_slow_all_the_time() -> None:
    """Two units: the second is gathered for 30 seconds, beside which the first, of 2, takes 3."""
    times = timed(emit(shape(2)), lambda group: 30.0 if group.unit else 1.0, 0, 2, 4, 0.5)
    assert times.step_s == pytest.approx(1 + 30 + 2 + 4 + 1 / 3 + 4)


def test_what_recomputing_releases_is_gathered_again() -> None:
    twice = ((ONE._replace(gathers=2), 2), (LAST, 1))
    listed = dataclasses.replace(shape(3), stages=(twice,))
    # The network is what lasts: three gathers, two units twice more each, one of which computing of 0.2 hides no part.
    assert timed(emit(listed), 1, 0, 0.1, 0.2).step_s > timed(emit(shape(3)), 1, 0, 0.1, 0.2).step_s + 1.5
    verify(emit(listed))


def test_the_next_backward_waits_for_the_reduction_before_the_last() -> None:
    """One buffer is reduced at a time: a unit's gradients are copied into it when the ones before are out."""
    program = emit(shape(4))
    reduces = [n for n, kind in enumerate(program.ranks[0].kind) if kind is ActionKind.REDUCE_GRAD]
    regions = [n for n, kind in enumerate(program.ranks[0].kind) if kind is ActionKind.COMPUTE]
    behind = [next(r for r in regions if r > reduces[2])]
    assert reduces[1] in program.ranks[0].waits[behind[0]]
    assert timed(program, 0, 10, 1, 1).step_s == pytest.approx(4 + 1 + 4 * 10)


def test_alike_micro_batches_are_listed_once() -> None:
    every = timed(emit(shape(5, micro_batches=9)), 1, 2, 1, 3, 0.25).step_s
    assert timed(emit(shape(5, micro_batches=2, more=7)), 1, 2, 1, 3, 0.25).step_s == pytest.approx(every)


def test_experts_are_asked_for_with_their_block_or_when_their_module_begins() -> None:
    """Ahead they come beside a whole block; by themselves beside what is between the block's begin and theirs."""
    plan = schedule("1f1b", 1, 1, 1)
    late, ahead = (ListShape(plan, (((EXPERTS, 4),),), "parameters", blocks_ahead=early) for early in (False, True))
    for one in (late, ahead):
        verify(emit(one))
    late_s, ahead_s = (
        timed(emit(one), lambda group: 1.5 if "ep" in group.axes else 0.0, 0, 1, 1).step_s for one in (late, ahead)
    )
    assert late_s >= 24 + 4 * 0.5  # each block's forward waits half a second
    assert ahead_s == pytest.approx(24 + 0.5 + 0.5)  # the first block's does, and the last one's backward


SHAPES = [
    shape(3),
    shape(3, micro_batches=3),
    shape(3, "optimizer", micro_batches=2),
    shape(3, "gradients", micro_batches=2),
    shape(3, "", overlap_reduce=False),
    shape(3, "", buckets=(4,)),
    shape(3, overlap_gather=False),
    *(pipeline(kind, shards) for kind in KINDS for shards in ("", "optimizer", "parameters")),
    dataclasses.replace(pipeline("1f1b", ""), tied=True, sums=True, overlap_send=False),
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_what_is_emitted_holds_and_reads_back(number: int) -> None:
    program = emit(SHAPES[number])
    verify(program)
    text = program.text()
    again = parse_program(text.splitlines())
    assert again.text() == text
    verify(again)
    assert timed(program, 1, 1, 2, 4).step_s > 0


def test_sizes_that_only_some_programs_have_are_read_back() -> None:
    program = offloaded(chain(2)).program(overhead_bytes=10, workspace_bytes=20)
    program = dataclasses.replace(program, staging_bytes=30, spare_bytes=40, reducing_bytes=50)
    again = parse_program(program.text().splitlines(), program.graph, program.tiers)
    assert (again.staging_bytes, again.spare_bytes, again.reducing_bytes) == (30, 40, 50)
    assert again.text() == program.text()


@pytest.mark.parametrize(
    "line", ["0 COMPUTE nowhere op=0", "1 COMPUTE compute", "op 0 x", "storage 0 border 1 up", "what"]
)
def test_a_line_that_is_no_action_is_refused(line: str) -> None:
    with pytest.raises(ProgramError, match="expected"):
        parse_program([line])


def test_lists_of_several_ranks_are_no_program_of_one_device() -> None:
    program = emit(pipeline("1f1b", ""))
    with pytest.raises(ProgramError, match="one class of ranks, got 4"):
        _ = program.actions
    for one in (program, emit(shape(2))):
        with pytest.raises(SimulationError, match="one device at the grain of kernels, got Program"):
            simulate(one, "h100")


def broken(program: Program, rank: int, change: Callable[[ActionList], None]) -> Program:
    ranks = parse_program(program.text().splitlines()).ranks
    change(ranks[rank])
    return dataclasses.replace(program, ranks=ranks)


def test_every_wait_that_orders_two_streams_is_needed() -> None:
    """Without any one wait of a region for a gather the check fails; so it does without a RECV's."""
    for listed in (shape(4), pipeline("1f1b", "parameters")):
        program = emit(listed)
        for rank, actions in enumerate(program.ranks):
            waits = [
                (n, w) for n, each in enumerate(actions.waits) for w in each if actions.kind[n] is ActionKind.COMPUTE
            ]
            gathers = [(n, w) for n, w in waits if actions.kind[w] is ActionKind.UNSHARD]
            assert gathers

            def drop(own: ActionList, number: int = gathers[-1][0], wait: int = gathers[-1][1]) -> None:
                own.waits[number] = tuple(w for w in own.waits[number] if w != wait)

            with pytest.raises(ProgramError, match="expected to wait for action"):
                verify(broken(program, rank, drop))


def _kinds(actions: ActionList, kind: ActionKind) -> list[int]:
    return [number for number, each in enumerate(actions.kind) if each is kind]


def _becomes(kind: ActionKind, to: ActionKind, place: int = 0) -> Callable[[ActionList], None]:
    def change(actions: ActionList) -> None:
        number = _kinds(actions, kind)[place]
        actions.kind[number] = to
        if to is ActionKind.STEP:
            actions.storage[number] = -1

    return change


def _swap_meetings(actions: ActionList) -> None:
    first, second = _kinds(actions, ActionKind.ALL_REDUCE)[-2:]
    actions.group[first], actions.group[second] = actions.group[second], actions.group[first]


def _other_micro_batch(actions: ActionList) -> None:
    actions.micro_batch[_kinds(actions, ActionKind.SEND)[0]] += 1


def _to_itself(actions: ActionList) -> None:
    actions.peer[_kinds(actions, ActionKind.SEND)[0]] = 1


def _waits_ahead(actions: ActionList) -> None:
    actions.waits[0] = (5,)


TIED = dataclasses.replace(pipeline("1f1b", ""), tied=True)
FAULTS = [
    (shape(4), 0, _becomes(ActionKind.RESHARD, ActionKind.STEP), "got one that"),
    (shape(4), 0, _becomes(ActionKind.RESHARD, ActionKind.STEP, -1), "released by the end"),
    (shape(4), 0, _becomes(ActionKind.UNSHARD, ActionKind.RESHARD), "got a sharded one"),
    (shape(4), 0, _becomes(ActionKind.UNSHARD, ActionKind.REDUCE_GRAD), "got it sharded"),
    (pipeline("1f1b", ""), 0, _becomes(ActionKind.SEND, ActionKind.STEP), "never sends it"),
    (pipeline("1f1b", ""), 1, _becomes(ActionKind.RECV, ActionKind.STEP), "never receives it"),
    (pipeline("1f1b", ""), 1, _other_micro_batch, "got it twice|never"),
    (pipeline("1f1b", ""), 1, _to_itself, "never"),
    (pipeline("1f1b", ""), 1, _waits_ahead, "a wait points backward"),
    (TIED, 0, _swap_meetings, "collectives in one order"),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_broken_list_is_refused(number: int) -> None:
    listed, rank, change, message = FAULTS[number]
    with pytest.raises(ProgramError, match=message):
        verify(broken(emit(listed), rank, change))


def test_ranks_that_wait_for_each_other_are_found() -> None:
    """A rank whose forward takes the gradient, and whose backward the activation, waits for itself."""

    def crossed(actions: ActionList) -> None:
        first, second = _kinds(actions, ActionKind.RECV)
        for column in (actions.storage, actions.peer):
            column[first], column[second] = column[second], column[first]

    stuck = broken(emit(pipeline("gpipe", "", micro_batches=1)), 1, crossed)
    with pytest.raises(ProgramError, match="come to its turn"):
        verify(stuck)
    with pytest.raises(SimulationError, match="waits forever"):
        timed(stuck, 0, 0, 1, 1)


seconds = st.floats(0.0, 5.0)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8), seconds, seconds, st.floats(0.0, 1.0))
def test_bounds(units: list[tuple[float, float]], forward: float, backward: float, slowdown: float) -> None:
    """No shorter than its computing or its network, and no longer than both one after the other."""
    program = emit(shape(len(units)))

    def price(key: Priced) -> float:
        kind, what, _ = key
        if isinstance(what, Region):
            return forward if what.work is Work.FORWARD else backward
        if isinstance(what, ParameterGroup) and kind in (ActionKind.UNSHARD, ActionKind.REDUCE_GRAD):
            return units[what.unit][kind is ActionKind.REDUCE_GRAD]
        return 0.0

    lasts = action_seconds(program, price)
    computed = len(units) * (forward + backward)
    actions = program.ranks[0]
    network = sum(each for each, stream in zip(lasts, actions.stream, strict=True) if stream == NETWORK)
    times = run_ranks(program, lasts, [slowdown])
    assert times.step_s >= max(computed, network) - 1e-9
    assert times.step_s <= (computed + network) * (1 + slowdown) + 1e-9
    assert run_ranks(program, lasts).step_s <= times.step_s + 1e-9
    by_stream = sorted(zip(actions.stream, times.start_s, times.end_s, strict=True))
    for stream, rows in itertools.groupby(by_stream, key=lambda row: row[0]):
        ends = [(start, end) for _, start, end in rows if end > start]
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(sorted(ends))), stream

"""Profile of a user's own software: a script's blocks are run for a minute, and switches are fitted to them.

[Note: fit of a profile]
A step is linear in what is sought, and the simulator says how much of each a step has, as it does for any prediction:

    products              products * root of seconds^2 + (bytes / product_bytes_per_s)^2, by the profiler's time
    attention             measured / predicted, by the profiler's time
    the rest of a pass    launch_s * kernels + memory-bound * seconds + loss * seconds + gradient_copies * seconds
                          + step_s
    behind backward       optimizer * seconds + parameter_s * tensors + step_s
    on several ranks      measured beyond one rank = reduction * seconds + reduced_parameter_s * tensors

What several ranks take beyond one is what was measured among them less what was measured alone, the latter longer by as
much as the simulator says that processes beside each other are; what they gather, of ZeRO-3, is in that. So what the
fit of one rank leaves of a case is not taken for an exchange: of three cases it was 5 to 20% of a step, and predictions
on two ranks were 10 to 15% too long. A factor of exchanges is fitted for each number of ranks that was measured (2, 4,
... up to --ranks), as what the machine file says of each number errs by itself.

Products come from steps that the profiler looked at, the pass from others between these, and a host that is slower now
would make the rest of a pass, their difference, anything: of one model it was from 0 to 60 ms of 300. So both are taken
from the same steps: products and attention as a share of a profiled pass, less what the profiler needs for each
operation, by the cases in which that counts most.

Each line is solved by least squares of shares of a step with nothing below 0, factors drawn a little to 1. A factor of
operations holds for those of the machine file, so a profile belongs to the host and the machine file it was made with.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.cost.hosting import update_bytes
from lading.cost.kernels import LOW_KEY
from lading.errors import CaptureError, ConfigError
from lading.files import write_text
from lading.ir.layout import Layout, parse_layout
from lading.ir.machine import Machine
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import Collective
from lading.runtime.host import host_id
from lading.runtime.probe import QUIET
from lading.runtime.probe_software import (
    GATHERED_BYTES,
    TRIES,
    Measured,
    ProbeModel,
    ProfileCase,
    ProfiledRanks,
    Timing,
    UserSoftware,
    batch_of,
    cases,
    measure,
)
from lading.runtime.supervised import supervised
from lading.sim.parts import ATTENTION, MEMORY, PRODUCTS
from lading.sim.simulate import Simulated, machine_of, prices_of, simulate
from lading.tracing.tabulate import module_table

Progress = Callable[[str], None]
#: Architecture that factors of processors are given for (``Device.architecture``).
_CPU = "cpu"
#: Seconds of a launch under which launches are counted; least of a launch, as 0 leaves it to the machine file.
_UNIT_S, _LEAST_LAUNCH_S = 1e-6, 1e-8
#: Weight of a factor's being 1 beside a case's error as a share of its step.
_DRAWN = 0.005
#: Seconds added to a step whose share an error is: by about a tenth of it steps of a millisecond differ by themselves.
_JITTER_S = 3e-3
#: What a stack takes for a factor lies between these.
_RANGE = (0.11, 9.9)
#: Copies of gradients in a step below which there are none: software copies all of them or does not.
_LEAST_COPIES = 0.5
#: Cases whose products are large enough to say what products take.
_OF_KERNELS = ("middle", "large")
_DIGITS = 4
#: Rates of products' bytes that are tried.
_PRODUCT_BYTES_PER_S = tuple(1e9 * 1.5**step for step in range(11))
#: Share of the time in which one process is measured, where several are too.
_ALONE = 0.6


@dataclass(frozen=True)
class ProfileRow:
    """One case: seconds of a step measured, and predicted with the switches it began with and with the profile."""

    case: str
    ranks: int
    measured_s: float
    before_s: float
    after_s: float

    def __str__(self) -> str:
        before, after = (seconds / self.measured_s - 1 for seconds in (self.before_s, self.after_s))
        return f"{self.case:10}{self.ranks:6}{self.measured_s * 1e3:11.2f}{before:+14.1%}{after:+14.1%}"


#: Heads of ``ProfileRow``'s columns.
HEAD = f"{'case':10}{'ranks':>6}{'measured ms':>12}{'before':>13}{'with profile':>14}"


@dataclass(frozen=True)
class Profile:
    """Software as a set of switches, and how well it tells the steps that it was made from."""

    stack: Stack
    rows: tuple[ProfileRow, ...]


def profile_to(
    path: Path, script: Path, machine_file: Path, ranks: int = 1, *, seconds: float = 60.0, progress: Progress = print
) -> Profile:
    """Measure the software of a script and write it as a set of switches, which --stack takes.

    Args:
        script: [Note: a script of software] in lading.runtime.probe_software.
        machine_file: File that ``lading probe`` wrote for this host.
        ranks: Processes to measure besides one alone; 2, 4, ... fewer are measured too.
        seconds: Time for steps, of one process and of several together.
        progress: Called with one line per stage.
    Raises:
        ConfigError: the script or the machine file is not what it should be, says how.
    """
    machine = _machine(machine_file, ranks)
    software = UserSoftware(script)
    progress(software.read)
    base = _without_factors(stack_by_name(software.like))
    cases_asked = cases(software.widths)
    bench = _Bench(software, str(machine_file), cases_asked)
    progress(f"captured {len(cases_asked)} models of {software.widths} wide")
    groups = _groups(machine, ranks, seconds)
    processes = " and of ".join(["one process", *(str(group.ranks) for group in groups[1:])])
    progress(f"steps of {processes}, {seconds:.0f} s and what starting and compiling take")
    measurements = measure(script, cases_asked, groups)
    alone = measurements[0]
    stack = _of_one(bench, base, alone, machine)
    for group, among in zip(groups[1:], measurements[1:], strict=True):
        stack = _of_ranks(bench, stack, alone, among, group.ranks, fit_hooks=group is groups[1])
    rows = [
        row
        for group, measurement in zip(groups, measurements, strict=True)
        for row in _rows(bench, base, stack, measurement, group.ranks)
    ]
    stack = replace(stack, name=path.stem, sources=_sources(stack, script, machine_file, ranks, measurements))
    if (others := max(measurement.other_load for measurement in measurements)) > QUIET:
        progress(busy_sentence(others))
    write_text(path, stack_to_toml(stack))
    return Profile(stack, tuple(rows))


def profile_within(limit_s: float, path: Path, script: Path, machine_file: Path, *, ranks: int = 1) -> Profile:
    """Profile a script in a process of its own, as it may never end, or end its process; prints each stage.

    Raises:
        ConfigError: as ``profile_to``, it took longer than ``limit_s``, or the script ended the process.
    """
    return supervised(
        profile_to,
        *(path, script, machine_file, ranks),
        limit_s=limit_s,
        what=str(script),
        advice="mend what does not end, or give it longer with --limit SECONDS",
        said=partial(print, flush=True),
    )


def _groups(machine: Machine, ranks: int, seconds: float) -> list[ProfiledRanks]:
    """Numbers of processes that are measured: one, 2, 4, ..., and all; each of several has the threads of a rank."""
    alone = max(1, machine.device.num_threads)
    if ranks == 1:
        return [ProfiledRanks(1, alone, seconds)]
    counts = sorted({ranks, *(2**power for power in range(1, ranks.bit_length()) if 2**power < ranks)})
    each_s, threads = (1 - _ALONE) * seconds / len(counts), max(1, machine.with_threads().device.num_threads)
    return [ProfiledRanks(1, alone, _ALONE * seconds), *(ProfiledRanks(n, threads, each_s) for n in counts)]


def _machine(path: Path, ranks: int) -> Machine:
    """Machine file that a profile is made against.

    Raises:
        ConfigError: of another host, of a GPU, or without what ranks share.
    """
    machine = load_machine(path)
    if machine.device.kind != "cpu":
        raise ConfigError(
            f"--machine {path}: expected processors, got {machine.device.name}; software is measured on processors only"
        )
    if machine.host_id != host_id():
        raise ConfigError(
            f"--machine {path}: expected a file measured on this host ({host_id()}), got one of "
            f"{machine.host_id or 'the catalog'}; measure it: lading probe --out {path}"
        )
    if ranks > 1 and machine.processes is None:
        raise ConfigError(
            f"--machine {path}: nothing was measured of ranks; expected a file of lading probe --ranks {ranks}"
        )
    return machine


def _without_factors(stack: Stack) -> Stack:
    """Stack without what a profile measures."""
    others = {name: factor for name, factor in stack.in_situ.items() if name.partition(".")[0] != _CPU}
    seconds = dict.fromkeys(("launch_s", "parameter_s", "reduced_parameter_s", "step_s", "gradient_copies"), 0.0)
    return replace(stack, **seconds, product_bytes_per_s=0.0, fresh_bytes_per_s={}, in_situ=others)


class _Bench:
    """Cases as the simulator sees them on a machine.

    Raises:
        ConfigError: the script's block cannot be captured.
    """

    def __init__(self, software: UserSoftware, machine: str, asked: Sequence[ProfileCase]) -> None:
        self.software, self.machine, self.asked = software, machine, tuple(asked)
        tables: dict[tuple[int, int], ModelTable] = {}
        self.tables: list[ModelTable] = []
        for case in asked:
            key = case.width, case.vocabulary
            if key not in tables:
                tables[key] = self._table(case)
            self.tables.append(replace(tables[key], counts=(1, case.blocks, 1)))

    def _table(self, case: ProfileCase) -> ModelTable:
        torch.manual_seed(0)
        model = ProbeModel(replace(case, blocks=2), self.software.block)
        try:
            table = module_table(
                model, batch_of(case, 0), self.software.loss, case.name, tokens=case.tokens, whole=False
            )
        except ConfigError:
            raise
        except Exception as error:  # code of the user's: whatever it raises under capture is told as theirs
            message = str(error) if isinstance(error, CaptureError) else f"{type(error).__name__}: {error!s:.300}"
            raise ConfigError(
                f"{self.software.path}: block({case.width}) cannot be captured: {message}; give a plain module from "
                "block and compile or wrap it in prepare(model)"
            ) from error
        if len(table.counts) != 3:
            raise ConfigError(
                f"{self.software.path}: expected block({case.width}) to make blocks that repeat between an embedding "
                "and a head, found no run of equal ones; make each of the same operations, and of more than the one "
                "product that a head is"
            )
        return table

    def layout(self, case: ProfileCase, ranks: int) -> Layout:
        """Layout of a case; a process alone shares nothing."""
        shared = f",dp{ranks},{self.software.layout}" if ranks > 1 else ""
        return parse_layout(f"fp32{shared},mb{case.rows},gb{ranks * case.rows}")

    def request(self, number: int, stack: Stack, ranks: int) -> StepRequest:
        """Step of a case under software."""
        case = self.asked[number]
        return StepRequest(
            name=case.name,
            model=Architecture(family=case.name, symbols={}, blocks=(("block", case.blocks),)),
            seq_len=case.tokens,
            machine=self.machine,
            layout=self.layout(case, ranks),
            stack=stack,
        )

    def simulated(self, number: int, stack: Stack, ranks: int = 1) -> Simulated:
        """Simulate a case."""
        return simulate(self.request(number, stack, ranks), self.tables[number])


def _of_one(bench: _Bench, base: Stack, measured: Measured, machine: Machine) -> Stack:
    """Fit what one process says ([Note: fit of a profile])."""
    base = _with_fresh(base, measured, 1)
    counted = [_Counted.of(bench, base, number) for number in range(len(bench.asked))]
    timings = _paired(measured.timings)
    factors: dict[str, float] = {}
    kernels = [number for number, case in enumerate(bench.asked) if case.name in _OF_KERNELS]
    measured_s = sum(timings[number].attention_s for number in kernels)
    predicted_s = sum(counted[number].attention for number in kernels)
    if measured_s and predicted_s:
        factors[ATTENTION] = measured_s / predicted_s
    weights = _weights(timings)
    factors[PRODUCTS], rate = _products(bench, base, np.array([timing.products_s for timing in timings]), weights)
    if ATTENTION not in factors:  # in operations of its own: it is in what is left of the pass
        counted = [replace(counts, memory=counts.memory + counts.attention) for counts in counted]
    left = np.array([timing.pass_s - timing.products_s - timing.attention_s for timing in timings])
    columns = [
        [counts.kernels * _UNIT_S, counts.memory + counts.loss, counts.loss, counts.copies, 1.0] for counts in counted
    ]
    drawn = (False, True, False, False, False)
    solved = _solved(columns, left, weights, drawn=drawn)
    if solved[3] < _LEAST_COPIES:
        solved = _solved([[*row[:3], 0.0, row[4]] for row in columns], left, weights, drawn=drawn)
    launches, memory, beyond, copies, once_s = solved
    factors |= {MEMORY: memory, "loss": (_limited(memory) + beyond) / _limited(memory)}
    if ATTENTION not in factors:
        factors[ATTENTION] = memory
    behind = np.array([timing.update_s for timing in timings])
    columns = [[counts.optimizer, counts.tensors * _UNIT_S, 1.0] for counts in counted]
    optimizer, tensor_units, step_s = _solved(columns, behind, weights, drawn=(True, False, False))
    factors["optimizer"] = optimizer
    if measured.product_s:
        factors[LOW_KEY] = measured.product_s[0] / measured.product_s[1]
    return replace(
        base,
        title=f"{bench.software.framework}, measured",
        framework=bench.software.framework,
        fitted=tuple(dict.fromkeys((*base.fitted, _CPU))),
        launch_s=_rounded(max(_LEAST_LAUNCH_S, launches * _UNIT_S)),
        parameter_s=_rounded(tensor_units * _UNIT_S),
        product_bytes_per_s=_rounded(rate),
        step_s=_rounded(step_s + once_s),
        gradient_copies=_rounded(copies),
        in_situ=base.in_situ | {f"{_CPU}.{kind}": _rounded(_limited(factor)) for kind, factor in factors.items()},
        **_host_update(base, counted[-1], timings[-1], machine),
    )


def _with_fresh(stack: Stack, measured: Measured, ranks: int) -> Stack:
    """Software that knows what memory costs that the system gives anew to so many ranks at once."""
    if not measured.fresh_s:
        return stack
    rates = stack.fresh_bytes_per_s | {str(ranks): _rounded(1 / measured.fresh_s)}
    return replace(stack, fresh_bytes_per_s=rates)


def _paired(timings: Sequence[Timing]) -> tuple[Timing, ...]:
    """Timings with products and attention at the speed of the pass ([Note: fit of a profile])."""
    profiled = [timing for timing in timings if timing.profiled_s]
    short = sorted(profiled, key=lambda timing: timing.pass_s)[:2]
    events = sum(timing.events for timing in short)
    each_s = max(0.0, sum(timing.profiled_s - timing.pass_s for timing in short) / events) if events else 0.0
    paired: list[Timing] = []
    for timing in timings:
        pure_s = timing.profiled_s - each_s * timing.events
        speed = timing.pass_s / pure_s if pure_s > 0 else 1.0
        paired.append(replace(timing, products_s=timing.products_s * speed, attention_s=timing.attention_s * speed))
    return tuple(paired)


def _weights(timings: Sequence[Timing]) -> Any:
    """Weights of the cases' equations: an error counts as a share of the step."""
    return np.array([1 / (timing.step_s + _JITTER_S) for timing in timings])


def _products(bench: _Bench, base: Stack, seen: Any, weights: Any) -> tuple[float, float]:
    """Fit the factor of products, and the rate of their bytes (0 where none is worth it), to seconds of each case."""
    best, min_error = (1.0, 0.0), float("inf")
    for rate in (0.0, *_PRODUCT_BYTES_PER_S):
        stack = replace(base, product_bytes_per_s=rate)
        predicted_s = [
            bench.simulated(number, stack).step.shares_s.get(PRODUCTS, 0.0) for number in range(len(bench.asked))
        ]
        (factor,) = _solved([[seconds] for seconds in predicted_s], seen, weights, drawn=(True,))
        error = float(np.sum(((factor * np.array(predicted_s) - seen) * weights) ** 2))
        if error < min_error:
            best, min_error = (factor, rate), error
    return best


def _of_ranks(
    bench: _Bench, stack: Stack, alone: Measured, measured: Measured, ranks: int, *, fit_hooks: bool
) -> Stack:
    """Fit what several processes say beyond one ([Note: fit of a profile]).

    Args:
        stack: Fitted to what one process says, and to fewer processes.
        alone: Steps of one process.
        fit_hooks: Fit the host's seconds of a reduced tensor too; else they are known from fewer processes.
    """
    stack = _with_gathers(bench, _with_fresh(stack, measured, ranks), measured, ranks)
    zero = 0 if bench.software.layout == "zero0" else 3  # as processes of one host are priced
    op = "all_reduce" if zero <= stack.reduces_whole else "reduce_scatter"
    key = f"{_CPU}.{op}.{ranks}"
    once, twice = (replace(stack, in_situ=stack.in_situ | {key: factor}) for factor in (1.0, 2.0))
    hooked = replace(once, reduced_parameter_s=stack.reduced_parameter_s + _UNIT_S)
    beyond_s, columns = [], []
    for number, (own, timing) in enumerate(zip(alone.timings, measured.timings, strict=True)):
        once_s, two, hooks = (bench.simulated(number, variant, ranks).step.step_s for variant in (once, twice, hooked))
        known_s = stack.reduced_parameter_s / _UNIT_S * (hooks - once_s)
        slower = (2 * once_s - two - known_s) / bench.simulated(number, stack).step.step_s
        beyond_s.append(timing.step_s - known_s - own.step_s * slower)
        columns.append([two - once_s, hooks - once_s][: 2 if fit_hooks else 1])
    drawn = (True, False)[: 2 if fit_hooks else 1]
    factor, *tensor_units = _solved(columns, np.array(beyond_s), _weights(measured.timings), drawn=drawn)
    hooks_s = _rounded(stack.reduced_parameter_s + sum(tensor_units) * _UNIT_S)
    return replace(stack, reduced_parameter_s=hooks_s, in_situ=stack.in_situ | {key: _rounded(_limited(factor))})


def _with_gathers(bench: _Bench, stack: Stack, measured: Measured, ranks: int) -> Stack:
    """Software that knows how much longer than the machine file says a gathering among so many ranks takes."""
    if not measured.gather_s:
        return stack
    key = f"{_CPU}.all_gather.{ranks}"
    request = bench.request(0, replace(stack, in_situ=stack.in_situ | {key: 1.0}), ranks)
    prices = prices_of(request, machine_of(request), bench.tables[0])
    factor = measured.gather_s / prices.collective_s(Collective("all_gather", "dp", GATHERED_BYTES))
    return replace(stack, in_situ=stack.in_situ | {key: _rounded(_limited(factor))})


@dataclass(frozen=True)
class _Counted:
    """Parts of a case's step, before anything is measured.

    Attributes:
        products, attention, memory, loss, optimizer: Seconds; ``memory`` is memory-bound and not of the loss.
        copies: Seconds of copying gradients into a buffer and back once.
        kernels, tensors: Number of launches, and of parameters' tensors.
        elements: Parameters.
    """

    products: float
    attention: float
    memory: float
    loss: float
    optimizer: float
    copies: float
    kernels: float
    tensors: int
    elements: int

    @classmethod
    def of(cls, bench: _Bench, base: Stack, number: int) -> _Counted:
        """Count a case under the switches that a profile begins with."""
        plain = replace(base, launch_s=_UNIT_S)
        twice = replace(plain, in_situ=plain.in_situ | {f"{_CPU}.loss": 2.0})
        copying = replace(plain, gradient_copies=1.0)
        simulated = bench.simulated(number, plain)
        shares = simulated.step.shares_s
        memory = shares.get(MEMORY, 0.0)
        loss = bench.simulated(number, twice).step.shares_s.get(MEMORY, 0.0) - memory
        return cls(
            products=shares.get(PRODUCTS, 0.0),
            attention=shares.get(ATTENTION, 0.0),
            memory=memory - loss,
            loss=loss,
            optimizer=shares["optimizer"],
            copies=bench.simulated(number, copying).step.step_s - simulated.step.step_s,
            kernels=shares.get("launches", 0.0) / _UNIT_S,
            tensors=sum(stage.parameters for stage in simulated.step.stages),
            elements=sum(sum(stage.trained.values()) for stage in simulated.step.stages),
        )


def _host_update(base: Stack, counted: _Counted, timing: Timing, machine: Machine) -> dict[str, Any]:
    """Share of the memory's bandwidth that the update reaches here: that of updates on hosts behind GPUs."""
    wide = base.in_precision("fp32")
    bound_s = counted.elements * update_bytes(wide) / machine.device.memory_bandwidth_bytes_per_s
    return {"host_update": "fused", "host_optimizer": _rounded(min(1.0, max(1e-3, bound_s / timing.update_s)))}


def _solved(columns: Sequence[Sequence[float]], right: Any, weights: Any, *, drawn: Sequence[bool]) -> list[float]:
    """Solve weighted least squares with no unknown below 0.

    Args:
        columns: [case, unknown].
        weights: Weight of each case's equation.
        drawn: Whether an unknown is a factor, drawn to 1.
    """
    left = np.array(columns) * weights[:, None]
    targets = right * weights
    for place, draws in enumerate(drawn):
        if draws:
            row = np.zeros(left.shape[1])
            row[place] = _DRAWN
            left, targets = np.vstack([left, row]), np.append(targets, _DRAWN)
    unknowns = range(left.shape[1])
    best, min_error = np.zeros(left.shape[1]), float("inf")
    for count in range(1, left.shape[1] + 1):
        for chosen in combinations(unknowns, count):
            tried = np.zeros(left.shape[1])
            tried[list(chosen)] = np.linalg.lstsq(left[:, list(chosen)], targets, rcond=None)[0]
            error = float(np.sum((left @ tried - targets) ** 2))
            if tried.min() >= 0 and error < min_error:
                best, min_error = tried, error
    return [float(value) for value in best]


def _limited(factor: float) -> float:
    return min(max(factor, _RANGE[0]), _RANGE[1])


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rows(bench: _Bench, base: Stack, stack: Stack, measured: Measured, ranks: int) -> list[ProfileRow]:
    rows: list[ProfileRow] = []
    for number, (case, timing) in enumerate(zip(bench.asked, measured.timings, strict=True)):
        before, after = (bench.simulated(number, stack_shown, ranks).step.step_s for stack_shown in (base, stack))
        rows.append(ProfileRow(case.name, ranks, timing.step_s, before, after))
    return rows


def busy_sentence(others: float) -> str:
    """Sentence on a profile that was measured beside others."""
    return (
        f"others took {others:.0%} of the processors while steps were measured, {TRIES} times in a row: on a quiet "
        "host steps are shorter; profile again when it is quiet"
    )


def _sources(
    stack: Stack, script: Path, machine_file: Path, ranks: int, measured: Sequence[Measured]
) -> dict[str, str]:
    """Say where each measured number comes from."""
    today = datetime.date.today().isoformat()
    source_text = (
        f"measured {today} by lading probe --software {script.name} against {machine_file.name}, torch "
        f"{torch.__version__}, {host_id()}"
    )
    limits = [name for name, factor in stack.in_situ.items() if factor in _RANGE]
    source = (
        f"{source_text}; among {ranks} ranks"
        if ranks > 1
        else f"{source_text}; collectives as the machine file has them"
    )
    if measured[0].no_product:
        source += f"; {measured[0].no_product}"
    if limits:
        source += f"; at the end of what a factor may be: {', '.join(limits)}"
    if (others := max(measurement.other_load for measurement in measured)) > QUIET:
        source += f"; {busy_sentence(others)}"
    keys = ("launch_s", "parameter_s", "step_s", "gradient_copies", "host_update", "host_optimizer", "fitted")
    return stack.sources | dict.fromkeys(keys, source_text) | {"in_situ": source}


@cache
def _defaults() -> Mapping[str, Any]:
    return vars(Stack(name="", title=""))


def stack_to_toml(stack: Stack) -> str:
    """Write software as TOML: ``stack_by_name`` of the file gives the same switches.

    What every file has by itself is left out, its name too.
    """
    lines: list[str] = []
    tables: list[str] = []
    for field in dataclasses.fields(stack):
        value = getattr(stack, field.name)
        if field.name == "name" or (value == _defaults()[field.name] and field.name != "title"):
            continue
        if isinstance(value, dict):
            table: dict[str, Any] = value
            tables += ["", f"[{field.name}]", *(f"{_text(key)} = {_text(item)}" for key, item in table.items())]
        else:
            lines.append(f"{field.name} = {_text(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        items: tuple[Any, ...] = value
        return "[" + ", ".join(map(_text, items)) + "]"
    return json.dumps(value) if isinstance(value, str | int) else repr(float(value))

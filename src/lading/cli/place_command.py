"""``lading place``: parts of a model on unlike devices."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from lading.cli.options import MODEL_HELP, JsonFile, TraceFile, Trust, check_targets, first_given, optional
from lading.errors import ConfigError
from lading.files import write_text
from lading.permissions import check_path
from lading.report.lines import line_columns, say, say_list
from lading.units import format_seconds

if TYPE_CHECKING:
    from lading.ir.fleet import Fleet
    from lading.ir.placement import PlacementProblem
    from lading.ir.request import Request
    from lading.planner.placement.contest import Contest


@dataclass(frozen=True, kw_only=True)
class PlaceCommand:
    """Put parts of a model on unlike devices: a GPU, a laptop, a server on Wi-Fi.

    Says what runs where, how far that is from the best, and what limits it.
    """

    machine: Annotated[
        str | None,
        optional("NAME|FILE", "Devices: a list of the catalog (laptop-and-server, two-desktops, ...), or a file."),
    ] = None
    model: Annotated[str | None, optional("NAME", MODEL_HELP.format("llama3-8b, gpt2"))] = None
    graph: Annotated[
        Path | None, optional("FILE.json", "Instead of both: tasks, flows and devices as plain numbers.")
    ] = None
    latency: Annotated[
        FlagCreatePairsOff[bool], arg(help="Place one forward pass instead of a training step.", help_behavior_hint="")
    ] = False
    seq: Annotated[int | None, optional("N", "Tokens of a sequence.")] = None
    batch: Annotated[int, arg(metavar="N", help="Sequences that are computed at once: a micro-batch.")] = 1
    micro_batches: Annotated[
        int, arg(metavar="N", help="Micro-batches of one step, which follow one another from device to device.")
    ] = 1
    units: Annotated[
        int | None, optional("N", "Capture the model and place at most N modules of it. 0 places single operations.")
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16"], arg(metavar="fp32|bf16", help="Number format of a captured model.")
    ] = "fp32"
    policy: Annotated[str | None, optional("NAME", "Use only this: chain, lp, branch, even or single.")] = None
    effort: Annotated[int, arg(metavar="N", help="Effort of the local search. Twice as much takes twice as long.")] = 6
    trace: TraceFile = None
    json: JsonFile = None
    out: Annotated[
        Path | None, optional("FILE.json", "Also write the placement, which lading.place and --plan read.")
    ] = None
    plan: Annotated[
        Path | None,
        optional("FILE.json", "Simulate a placement that was written before, on its devices or on --machine's."),
    ] = None
    trust: Trust = False

    def run(self) -> None:
        """Print the placement, what limits it, and every policy beside it."""
        check_targets(trace=self.trace, json=self.json, out=self.out)
        if self.effort < 0:
            raise ConfigError(f"--effort: expected 0 or more, got {self.effort}")
        if self.plan is not None:
            return self._simulate(self.plan)
        problem, fleet = self._problem()
        contest = _contest(problem, self.policy, self.effort)
        print_contest(contest, latency=self.latency)
        self._write(contest, fleet)

    def _simulate(self, path: Path) -> None:
        """Simulate the placement of a file, on the devices it was made for or others."""
        self._refuse("plan", ("machine", "trace", "json", "plan", "trust"))
        from lading.catalog.fleets import load_fleet
        from lading.ir.plan import Plan, PlanKind
        from lading.placing import replayed
        from lading.planner.placement.contest import Contest, too_full
        from lading.planner.placement.relaxed import relax

        plan = Plan.load(path, PlanKind.PLACEMENT)
        for key in ("model", "stack", *(() if self.machine else ("machine",))):
            if os.path.exists(name := str(getattr(plan.request, key))):
                check_path(name, f"{path}: request.{key}")
        fleet = load_fleet(self.machine or plan.request.machine)
        problem, placement = replayed(plan, fleet)
        relaxed = relax(problem)
        placement = dataclasses.replace(placement, bound_s=relaxed.bound_s if relaxed else 0.0)
        contest = Contest(problem, (placement,), (), placement.bound_s)
        print_contest(contest, latency=not plan.request.training)
        print(f"predicted when it was made: {format_seconds(plan.step_s)}", end="")
        print(
            ""
            if fleet.fingerprint == plan.request.machine_fingerprint
            else f", for other devices than {fleet.name} has now"
        )
        if not placement.fits:
            raise too_full(problem, placement, "the saved placement")
        self._write(contest, fleet)

    def _refuse(self, option: str, but: tuple[str, ...]) -> None:
        """Refuse options that would mean nothing beside ``--option``."""
        if given_option := first_given(self, but=but):
            raise ConfigError(
                f"{given_option}: expected nothing of the kind next to --{option}, which says it; leave it out"
            )

    def _write(self, contest: Contest, fleet: Fleet | None) -> None:
        """Write the files that were asked for."""
        problem = contest.problem
        if self.json is not None:
            from lading import __version__
            from lading.report.placement_table import summary

            figures = summary(problem, contest.placements, contest.failed, fleet)
            figures["version"] = __version__
            write_text(self.json, json.dumps(figures, indent=1) + "\n")
            print(f"wrote {self.json}")
        if self.trace is not None:
            from lading.planner.placement.trial import Trial
            from lading.report.perfetto import write_trace

            write_trace(self.trace, [Trial(problem).run(contest.best.devices, record=True).timeline()])
            print(f"wrote {self.trace}")
        if self.out is not None and fleet is not None:
            from lading.placing import saved

            saved(self._make_request(), fleet, problem, contest.best).save(self.out)
            print(f"wrote {self.out}")

    def _make_request(self) -> Request:
        """Make the request that the options ask for."""
        from lading.ir.request import Request

        assert self.model is not None
        assert self.machine is not None
        if min(self.batch, self.micro_batches) < 1 or min(self.units or 0, self.seq or 0) < 0:
            raise ConfigError(
                f"expected a batch and micro-batches of 1 or more, units and a sequence length of 0 or more, got "
                f"{self.batch}, {self.micro_batches}, {self.units or 0} and {self.seq or 0}"
            )
        return Request(
            model=self.model,
            machine=self.machine,
            seq_len=self.seq or 0,
            layout=f"mb{self.batch}",
            global_batch=self.batch * self.micro_batches,
            training=not self.latency,
            units=self.units,
            precisions=(self.precision,),
        )

    def _problem(self) -> tuple[PlacementProblem, Fleet | None]:
        if self.graph is not None:
            self._refuse("graph", ("graph", "policy", "effort", "trace", "json", "trust"))
            from lading.planner.placement.from_file import read_problem

            return read_problem(self.graph), None
        if self.model is None or self.machine is None:
            raise ConfigError("expected --model and --machine, or --graph GRAPH.json")
        from lading.catalog.fleets import load_fleet
        from lading.placing import problem_on

        fleet = load_fleet(self.machine)
        return problem_on(self._make_request(), fleet), fleet


def _contest(problem: PlacementProblem, policy: str | None, effort: int) -> Contest:
    from lading.planner.placement.contest import Contest, contest, place

    if policy is None:
        return contest(problem, effort=effort)
    placement = place(problem, policy, effort=effort)
    return Contest(problem, (placement,), (), placement.bound_s)


def print_contest(found: Contest, *, latency: bool) -> None:
    """Print the best placement, what limits it, and the other policies beside it."""
    from rich.console import Console

    from lading.report.placement_table import devices_table, limit, parts_table, policies_table

    problem, best = found.problem, found.best
    console = Console(width=line_columns(), highlight=False, markup=False)  # names are of files
    subject = "one pass" if latency else "a step"
    if problem.micro_batches > 1:
        subject += f" of {problem.micro_batches} micro-batches"
    head = f"{problem.name} on {', '.join(problem.network.devices)}: {subject} in {format_seconds(best.step_s)}"
    say(console, head, "bold")
    for table in (parts_table(problem, best), devices_table(problem, best)):
        if table is not None:
            console.print(table)
    if len(found.placements) > 1:
        console.print(policies_table(found.placements, found.failed))
    bound = f"no placement takes less than {format_seconds(best.bound_s)}; this one is {best.gap:.1%} above"
    say(console, bound if best.bound_s else "no bound is known")
    say(console, f"limits: {limit(problem, best)}")
    say_list(console, "Assumed", problem.assumed)

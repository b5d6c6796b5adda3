"""``lading plan``: a run inside its memory budget, or the layout of a model on a cluster and why the others lose."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, UseAppendAction, arg

from lading.cli.options import (
    ModelOptions,
    Overrides,
    RunFile,
    RunOptions,
    Trust,
    check_asked,
    check_targets,
    first_given,
    flag,
    optional,
    refuse_beside,
    refuse_run_options,
)
from lading.config import load_run
from lading.errors import ConfigError, PlanInfeasible
from lading.files import write_text
from lading.ir.action import DEVICE
from lading.report.lines import fitted, line_columns, say
from lading.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from lading.ir.machine import Machine
    from lading.ir.plan import Plan
    from lading.ir.request import Request
    from lading.planner.layouts import Layouts
    from lading.planner.refine import Refined
    from lading.planner.space import Space
    from lading.report.layout_table import LayoutRow

#: By what layouts have rows of their own in the table, coarse to fine.
_MESH = ("dp", "tp", "cp", "pp", "ep", "etp")
_WAYS = (*_MESH, "zero", "recompute", "offload", "micro_batch", "precision")
_FINE = (*_WAYS, "vpp", "schedule", "sp", "cp_comm", "recompute_layers")
_LEVELS = (_MESH, _WAYS, _FINE, (*_FINE, "shard"))
#: Options that mean something where a machine was measured on a host.
_OF_HOSTS = (
    *("model", "machine", "devices", "global_batch", "seq", "optimizer"),
    *("precision", "pin", "budget", "top"),
)
#: Options that mean something where a machine lists unlike devices.
_OF_FLEETS = ("model", "machine", "global_batch", "seq", "stack", "json")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """With --model, which layouts are searched, and what is said of them:"""

    precision: Annotated[
        str | None,
        optional(
            "NAMES",
            "Number format of matrix products: bf16 (if not given), fp32, fp16, fp8, mxfp8 or nvfp4. Several "
            "(bf16,fp8) or any lets the search choose.",
        ),
    ] = None
    pin: Annotated[
        UseAppendAction[tuple[str, ...]],
        optional(
            "KEY=VALUE",
            "Fix one choice of the layout, such as tp=8. Can be repeated. Keys: dp, tp, cp, pp, ep, etp, vpp, "
            "micro_batch (or mb), sp (yes, no), zero (0 to 3), shard, cp_comm, schedule, recompute (none, selective, "
            "full), recompute_layers, recompute_modules, precision, offload (none, optimizer, parameters), "
            "offload_to (a tier, such as disk).",
        ),
    ] = ()
    budget: Annotated[
        str | None, optional("SIZE", "Memory of each device that may be used, such as 40GB. If not given, all of it.")
    ] = None
    longest: Annotated[int | None, optional("N", "Tokens of the longest sequence; a batch of it must fit too.")] = None
    save: Annotated[
        Literal["sharded", "async", "gathered"],
        arg(
            help="How checkpoints are written: every rank its own part, the same while training goes on, or all by "
            "one rank."
        ),
    ] = "sharded"
    unshard: Annotated[
        Literal["residency", "reverse-greedy", "zero2", "zero3"],
        arg(help="Where each rank has a part of the parameters (zero 3): how to choose those that stay whole."),
    ] = "residency"
    tree: Annotated[
        FlagCreatePairsOff[bool], flag("Show the memory of every module at the peak, for layouts with zero 3.")
    ] = False
    top: Annotated[int, arg(metavar="N", help="Number of layouts to show.")] = 10
    to: Annotated[
        Literal["torchtitan", "megatron"] | None,
        optional("NAME", "Also write the first layout as settings of torchtitan or megatron, beside --out."),
    ] = None
    json: Annotated[Path | None, optional("FILE.json", "Also write the figures as JSON (docs/plan-json.md).")] = None


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Plan a run inside its memory budget, or spread a model over many devices.

    With a run file: keep, recompute or move every tensor between two uses.

    With --model: rank the ways to spread it (layouts).
    """

    run_file: RunFile = None
    overrides: Overrides = ()
    out: Annotated[Path, arg(metavar="FILE", help="File to write the plan to.")] = Path("plan.json")
    trust: Trust = False
    with_run: Annotated[RunOptions, OmitArgPrefixes, arg(name="run")] = field(default_factory=RunOptions)
    with_model: Annotated[ModelOptions, OmitArgPrefixes, arg(name="model")] = field(default_factory=ModelOptions)
    search: Annotated[SearchOptions, OmitArgPrefixes, arg(name="search")] = field(default_factory=SearchOptions)

    def run(self) -> None:
        """Print the plan and save it."""
        check_targets(out=self.out, json=self.search.json)
        check_asked(self.run_file, "RUN.toml", self.with_model)
        if self.run_file is None:
            refuse_run_options(self.with_run, self.overrides, "--model")
            return _plan_model(self)
        devices = self.with_model.devices or 0
        refuse_beside(self.run_file, dataclasses.replace(self.with_model, devices=None), self.search)
        run = load_run(self.run_file, self.overrides)
        from rich.console import Console

        from lading.alone import launcher, rank_number
        from lading.prepare import plan_run
        from lading.report.plan_table import print_plan
        from lading.report.progress import planning_progress

        with planning_progress() as progress:
            prepared = plan_run(run, devices=devices, cache=not self.with_run.no_cache, progress=progress)
        if rank_number():
            return
        print_plan(prepared.plan, prepared.program.graph, Console(width=line_columns()))
        prepared.plan.save(self.out)
        for words in prepared.notes:
            print(fitted(words))
        print(f"wrote {self.out}")
        if prepared.plan.ranks > 1:
            print(f"run it here by: {launcher(prepared.plan.ranks)}lading train --plan {shlex.quote(str(self.out))}")


def _plan_model(asked: PlanCommand) -> None:
    """Plan a model by name: its layout on alike devices, its placement where the machine lists unlike ones."""
    if (machine := asked.with_model.machine) is not None:
        from lading.catalog.fleets import lists_devices, load_fleet

        load_fleet(machine)
        if lists_devices(machine):
            return _plan_fleet(asked)
        from lading.catalog.load import load_machine

        if (host := load_machine(machine)).host_id and host.device.kind == "cpu":
            return _plan_host(asked, host)
    _plan_cluster(asked)


def _plan_host(asked: PlanCommand, host: Machine) -> None:
    """Plan a model as a run of the ranks of a host that was measured.

    Raises:
        ConfigError: an option that belongs to a cluster.
        PlanInfeasible: no layout fits.
    """
    model, search = asked.with_model, asked.search
    if option := first_given(model, search, but=_OF_HOSTS):
        raise ConfigError(
            f"{option} belongs to a cluster of the catalog's machines, got it next to --machine {model.machine}, "
            "which was measured on a host, whose ranks Lading itself runs; leave it out"
        )
    from lading.alone import launcher, num_ranks

    if num_ranks()[0] > 1:
        raise ConfigError("expected one process, as the layout is searched by one; start lading plan without torchrun")
    from rich.console import Console

    from lading.planner.space import parse_pins
    from lading.report.plan_table import figures_table, print_plan
    from lading.report.progress import planning_progress
    from lading.runtime.host import host_id
    from lading.spreading import spread_model

    request = _asked_request(asked, parse_pins(search.pin))
    if search.precision is not None:
        request = dataclasses.replace(request, precisions=tuple(map(str.strip, search.precision.split(","))))
    with planning_progress() as progress:
        spread_layouts = spread_model(request, host, progress=progress)
    prepared, console = spread_layouts.best, Console(highlight=False, width=line_columns())
    run, plan = prepared.run, prepared.plan
    batch = f"{request.global_batch:,} sequences of {run.data.sequence_length:,} tokens a step"
    ranks = "one rank" if request.devices == 1 else f"{request.devices:,} ranks"
    say(console, f"{request.model} on {ranks} of {host.device.name}, {batch}, "
        f"{run.optimization.precision}, by Lading", "bold")  # fmt: skip
    table = figures_table("Layouts", "layout", "micro-batches", "step", "memory a rank", "", texts=("",))
    for way in spread_layouts.ways[: search.top]:
        table.add_row(*way.cells)
    console.print(table)
    if any(way.prepared is None and not way.why for way in spread_layouts.ways[: search.top]):
        say(console, "> is the step with all of it in memory: not planned, as it is slower than the first even so")
    for sentence in spread_layouts.left_out:
        say(console, f"not searched - {sentence}")
    print_plan(plan, prepared.program.graph, console)
    plan.save(asked.out)
    say(console, f"wrote {asked.out}: {run.optimization.steps} steps, data {run.data.source}, into {run.out}; steps, "
        "rates and folders may be changed by hand there, under request.run")  # fmt: skip
    place = "here" if host.host_id == host_id() else f"on {host.host_id}"
    print(f"run it {place} by: {launcher(request.devices)}lading train --plan {shlex.quote(str(asked.out))}")


def _plan_cluster(asked: PlanCommand) -> None:
    """Print the layouts found, and save the winner."""
    from rich.console import Console

    from lading import __version__
    from lading.clusters import update_sentence
    from lading.planner.layouts import cluster_plan, find_layouts
    from lading.report.layout_table import layouts_lines
    from lading.report.progress import planning_progress

    space = asked_space(asked)
    console = Console(highlight=False, width=line_columns())
    begun = time.perf_counter()
    with planning_progress() as progress:
        layouts = find_layouts(
            space, lambda num_done, of, unit: progress.update(num_done / max(1, of), f"{num_done:,} of {of:,} {unit}")
        )
    seconds = time.perf_counter() - begun
    groups = shown(layouts.best, asked.search.top)
    rows = [dataclasses.replace(_row(group[0], asked.with_model.price), like=like_text(*group)) for group in groups]
    over = [_row(layout, asked.with_model.price) for layout in layouts.over]
    device = space.machine.device.name
    request, batch = space.request, space.wanted_request.global_batch
    say(console, f"{request.name} on {space.wanted_request.devices:,} x {device}, {batch:,} sequences of "
        f"{request.seq_len:,} tokens a step", "bold")  # fmt: skip
    say(console, request.stack.sentence())
    title, *table = layouts_lines(rows, over, console.width)
    say(console, title, "bold")
    updated = layouts.winner.simulated.updated
    update = [update_sentence(request.optimizer, updated.update)] if updated is not None else []
    for line in (*table, "", *update, *_describe_search(layouts, seconds), *_moments(layouts.winner)):
        say(console, line)
    if asked.search.json is not None:
        write_text(
            asked.search.json, json.dumps(_document(layouts, rows, over, asked.with_model.price), indent=1) + "\n"
        )
    plan = unsharded(asked, layouts, cluster_plan(layouts, __version__), console)
    plan.save(asked.out)
    say(console, f"wrote {asked.out}")
    if asked.search.to is not None:
        _hand_over(asked.search.to, layouts, asked.out, console)


def _hand_over(framework: str, layouts: Layouts, out: Path, console: Console) -> None:
    """Write the first layout as settings of a framework, and say what it cannot be told."""
    from lading.report.handover import HANDOVERS, HandedLayout

    request, stack = layouts.winner.simulated.request, layouts.space.request.stack
    handed = HandedLayout(
        model=request.name,
        layout=request.layout,
        seq_len=request.seq_len,
        compiled=stack.fusion == "compiled",
        overlaps=(stack.overlap_grad_reduce, stack.overlap_param_gather),
        stage_layers=layouts.winner.simulated.stage_layers,
        ahead=sum(layouts.space.table.counts[1:-1]) - request.model.layers,
    )
    settings = HANDOVERS[framework](handed)
    path = out.with_name(f"{out.stem}.{settings.file_name}")
    write_text(path, settings.text)
    for sentence in settings.unsaid:
        say(console, f"{framework} cannot be told - {sentence}")
    say(console, f"wrote {path}")


def _document(
    layouts: Layouts, rows: Sequence[LayoutRow], over: Sequence[LayoutRow], price: float | None
) -> dict[str, Any]:
    """Make the JSON document that ``--json`` writes."""
    from lading.report.layout_table import layout_figures

    space = layouts.space
    return {
        "model": space.request.name,
        "machine": space.machine.name,
        "stack": space.request.stack.name,
        "devices": space.wanted_request.devices,
        "global_batch": space.wanted_request.global_batch,
        "seq_len": space.request.seq_len,
        "pins": dict(sorted(space.wanted_request.pins.items())),
        "plans": layouts.counted,
        "plans_bounded_one_by_one": layouts.evaluated,
        "plans_simulated": layouts.proof.simulated,
        "proven": layouts.proven,
        "rest_s": layouts.proof.rest_s if layouts.proof.rest_s < float("inf") else None,
        "left_out": list(layouts.left_out),
        "layouts": [layout_figures(_row(layout, price), rows[0]) for layout in layouts.best],
        "over": [layout_figures(row, rows[0]) for row in over],
        "buckets": _buckets(layouts),
        "assumptions": list(layouts.winner.simulated.assumed),
    }


def _buckets(layouts: Layouts) -> dict[str, Any] | None:
    """Describe the buckets of the winner's gradients, and what the best size saves against a block at a time."""
    bucket = layouts.bucket
    if bucket is None:
        return None
    return {
        "bytes": bucket.best_bytes if bucket.is_worth else bucket.block_bytes,
        "is_block": not bucket.is_worth,
        "best_bytes": bucket.best_bytes,
        "best_saves_s": bucket.saves_s,
        "layout": str(layouts.chosen.request.layout),
        "step_s": layouts.chosen.step.step_s,
    }


def unsharded(asked: PlanCommand, found: Layouts, plan: Plan, console: Console) -> Plan:
    """Choose what stays unsharded where parameters are sharded; prints how, and returns the plan with it."""
    from lading.planner.moment import tree_of
    from lading.planner.peaks import room_of
    from lading.planner.unshard import choose_groups, plan_of
    from lading.report.plan_table import print_tree, unshard_table
    from lading.sim.modules import unfit

    space = found.space
    request = dataclasses.replace(space.request, layout=found.winner.layout)
    if reason := unfit(request, space.machine):
        if asked.search.unshard != "residency":
            raise ConfigError(
                f"--unshard {asked.search.unshard}: no plan written, as no groups of parameters are chosen: {reason}; "
                "pin zero=3 and pp=1, with offload=none or parameters, or leave --unshard out"
            )
        if asked.search.tree or request.layout.zero == 3:
            subject = "tree" if asked.search.tree else "groups of parameters, which lading.apply needs"
            say(console, f"no {subject}: {reason}; pin zero=3 and pp=1")
        return plan
    moments = found.winner.peaks
    grown = max(0, moments["longest"]["device"] - moments["step"]["device"])
    room = room_of(space)[DEVICE] - grown
    try:
        chosen = choose_groups(request, space.table, room, asked.search.unshard)
    except PlanInfeasible as error:  # its peak is counted buffer by buffer, that of the search by its largest
        raise PlanInfeasible(
            f"no plan written, as no groups of its parameters fit beside what {found.winner.layout} needs: {error}; "
            f"{_instead(asked, error, room)}",
            missing_bytes=error.missing_bytes,
            smallest_budget_bytes=error.smallest_budget_bytes,
        ) from error
    console.print(unshard_table(chosen.rows, chosen.policy, chosen.bound_s, chosen.budget_bytes))
    if chosen.why:
        say(console, f"budget: {chosen.why}")
    if asked.search.tree:
        print_tree(tree_of(chosen, space.table), console)
    unshard_plan = plan_of(chosen, plan.version)
    forward, backward = unshard_plan.unshards
    sentence = f"each rank gathers {forward} times in the forwards of a step and {backward} in the backwards"
    say(console, f"{sentence}; {unshard_plan.gap:.1%} above the bound")
    steady, moments = unshard_plan.peak_bytes["device"], plan.predictions.peaks
    longest = {**moments["longest"], "device": steady + grown}
    peaks = {**moments, "step": {**moments["step"], **unshard_plan.peak_bytes}, "longest": longest}
    return dataclasses.replace(
        unshard_plan,
        request=dataclasses.replace(plan.request, policy=unshard_plan.request.policy, budgets=unshard_plan.budgets),
        predictions=dataclasses.replace(unshard_plan.predictions, peaks=peaks),
        assumptions=plan.assumptions,
    )


def _instead(asked: PlanCommand, error: PlanInfeasible, room: int) -> str:
    """List options with which there may be a plan, the surest first."""
    if error.smallest_budget_bytes <= room and asked.search.unshard != "residency":
        return "leave --unshard out, which finds groups that fit"
    changes = ["--pin recompute=full", "--pin mb=1", "more --devices"]
    return f"try {', '.join(changes)}, or give each device {format_bytes(error.missing_bytes)} more with --budget"


def asked_space(asked: PlanCommand) -> Space:
    """Make the space of layouts that the options ask for.

    Raises:
        ConfigError: one that is needed is missing, or a name is not known.
    """
    from lading.clusters import space_of
    from lading.planner.space import parse_pins, precisions_of

    search = asked.search
    space = space_of(_asked_request(asked, parse_pins(search.pin)))
    if search.precision is None:
        return space
    return space.asking(precisions=precisions_of(search.precision, space.machine, space.request.stack))


def _asked_request(asked: PlanCommand, pins: dict[str, Any]) -> Request:
    """Make the request of a model on alike devices.

    Raises:
        ConfigError: an option that is needed is missing, or means nothing.
    """
    from lading.ir.request import Request

    model, search = asked.with_model, asked.search
    if model.machine is None or model.devices is None or model.global_batch is None:
        missing = [name for name in ("machine", "devices", "global_batch") if getattr(model, name) is None]
        raise ConfigError(f"expected --{' and --'.join(missing).replace('_', '-')} next to --model")
    if search.top < 1:
        raise ConfigError(f"--top: expected at least 1 layout to show, got {search.top}")
    if search.budget is not None and parse_bytes(search.budget, "--budget") < 1:
        raise ConfigError(f"--budget: expected memory of a device, such as 40GB, got {search.budget!r}")
    return model.request(
        pins=pins,
        longest=search.longest,
        save=search.save,
        top=max(Request.top, search.top),
        budgets={DEVICE: parse_bytes(search.budget, "--budget")} if search.budget else None,
    )


def shown(best: Sequence[Refined], most: int) -> list[list[Refined]]:
    """Group similar layouts into at most ``most`` rows, each with its fastest layout first.

    Layouts of one mesh form a row. If there are fewer than ``most`` such rows, layouts of a row also save memory in the
    same ways. Finer choices count only if that leaves a single row.

    Args:
        best: Layouts, the fastest first.
    """
    levels: list[list[list[Refined]]] = []
    for keys in _LEVELS:
        rows: dict[Hashable, list[Refined]] = {}
        for refined in best:
            rows.setdefault(tuple(getattr(refined.layout, key) for key in keys), []).append(refined)
        levels.append(list(rows.values()))
    enough = [rows for rows in levels[:2] if len(rows) >= most]
    several = [rows for rows in levels[1:] if len(rows) > 1]
    return (enough or several or levels[-1:])[0][:most]


def like_text(one: Refined, *others: Refined) -> str:
    """Say how many layouts a row stands for, how much slower they are, and in which choices they differ."""
    if not others:
        return ""
    names = [field.name for field in dataclasses.fields(one.layout)]
    differing = [name for name in names if any(getattr(o.layout, name) != getattr(one.layout, name) for o in others)]
    slower = max(other.step_s for other in others) / one.step_s - 1
    speed = f"up to {slower:.1%} slower" if slower >= 5e-4 else "as fast"
    return f"{len(others)} variant{'s' if len(others) > 1 else ''} {speed} ({', '.join(differing)})"


def _row(one: Refined, price_per_hour: float | None) -> LayoutRow:
    from lading.clusters import summary
    from lading.report.layout_table import LayoutRow

    figures = summary(one.simulated, price_per_hour)
    return LayoutRow(
        layout=str(one.layout),
        step_s=one.step_s,
        spread=one.simulated.spread,
        interval=one.simulated.interval,
        bound_s=one.bound_s,
        mfu=figures["mfu"],
        tokens_per_s_per_device=figures["tokens_per_s_per_device"],
        shares_s=one.simulated.step.shares_s,
        peaks=one.peaks,
        binding=one.binding,
        over="" if one.fits else over_text(one),
        price_per_billion_tokens=figures.get("price_per_billion_tokens"),
    )


def over_text(one: Refined) -> str:
    """Say what does not fit, and by how much: "activation 12 GB over"."""
    moment, tier, _ = one.binding
    fullest: dict[Any, int] = max(one.simulated.memory, key=lambda roles: sum(roles.values()))
    role = max(fullest, key=lambda name: fullest[name]) if moment == "step" else f"{tier} at moment {moment}"
    return f"{role} {format_bytes(one.over_bytes)} over"


def _describe_search(layouts: Layouts, seconds: float) -> list[str]:
    """Say how much was searched, and what is proven."""
    from lading.report.handover import stages_text

    proof, winner = layouts.proof, layouts.winner
    low, high = winner.simulated.interval
    lines = [
        f"interval: nine of ten steps of software stack {winner.simulated.request.stack.name} take {low:.2f} to "
        f"{high:.2f} times what is predicted; of two layouts only what differs counts",
        f"{layouts.counted:,} plans in {seconds:.1f} s: {layouts.evaluated:,} bounded one by one, the others with "
        f"their block; {proof.simulated:,} simulated by events",
    ]
    if layouts.proven:
        lines.append(f"proven: no plan of the space that fits is faster as simulated, nor comes before the first "
                     f"{layouts.proven} of {len(layouts.best)}")  # fmt: skip
    else:
        gap = 1 - proof.rest_s / winner.step_s
        lines.append(f"not proven: plans that were not simulated take at least {format_seconds(proof.rest_s)}, "
                     f"{gap:.2%} less than the first")  # fmt: skip
    layers = winner.simulated.stage_layers
    if len(set(layers)) > 1:
        lines.append(
            f"layers of the {len(layers)} stages of the first, in order of forward: {stages_text(layers)} (torchtitan: "
            "module_fqns_per_model_part, Megatron-LM: --pipeline-model-parallel-layout; --to writes them)"
        )
    if layouts.bucket is not None:
        lines.append(str(layouts.bucket))
    lines += [f"not searched - {sentence}" for sentence in layouts.left_out]
    return lines + [f"assumed - {sentence}" for sentence in winner.simulated.assumed]


def _moments(winner: Refined) -> list[str]:
    """List the five peaks of the winner."""
    moment, tier, share = winner.binding
    texts = [
        f"{name} {format_bytes(tiers[DEVICE])}"
        + "".join(f" + {tier} {format_bytes(size)}" for tier, size in tiers.items() if size and tier != DEVICE)
        for name, tiers in winner.peaks.items()
    ]
    return [f"memory: {', '.join(texts)}", f"binding: {tier} at moment {moment!r}, {share:.0%} of what there is"]


def _plan_fleet(asked: PlanCommand) -> None:
    """Place a step on unlike devices, in as many micro-batches as are fastest.

    Raises:
        ConfigError: an option that belongs to a cluster of alike devices.
        PlanInfeasible: no number of micro-batches gives one that fits.
    """
    model, search = asked.with_model, asked.search
    reset = dict.fromkeys(_OF_FLEETS)
    groups = [
        dataclasses.replace(group, **{name: None for name in reset if hasattr(group, name)})
        for group in (model, search)
    ]
    if option := first_given(*groups):
        raise ConfigError(
            f"{option} belongs to a cluster of alike devices, got it next to --machine {model.machine}, which "
            "lists unlike ones; leave it out"
        )
    assert model.model is not None
    assert model.machine is not None
    from lading import __version__
    from lading.catalog.fleets import load_fleet
    from lading.cli.place_command import print_contest
    from lading.ir.request import Request
    from lading.placing import best_of, saved
    from lading.report.placement_table import summary

    fleet = load_fleet(model.machine)
    asked_for = Request(
        model=model.model, machine=model.machine, seq_len=model.seq or 0, stack=model.stack or "default"
    )
    chosen, contest, tried = best_of(asked_for, fleet, 1 if model.global_batch is None else model.global_batch)
    print_contest(contest, latency=False)
    if len(tried) > 1:
        steps = ", ".join(f"{count}: {format_seconds(s) if s else 'does not fit'}" for count, s in tried.items())
        print(fitted(f"micro-batches of a step, searched briefly: {steps}"))
    saved(chosen, fleet, contest.problem, contest.best).save(asked.out)
    print(f"wrote {asked.out}")
    if search.json is not None:
        figures = summary(contest.problem, contest.placements, contest.failed, fleet)
        figures["version"] = __version__
        write_text(search.json, json.dumps(figures, indent=1) + "\n")
        print(f"wrote {search.json}")

"""``lading plan --model``: find the layout of a model on a cluster, and say why the others lose."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lading.errors import ConfigError, PlanInfeasible
from lading.report.lines import line_columns, say
from lading.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from lading.cli.commands import Plan
    from lading.ir.clusterplan import ClusterPlan
    from lading.planner.layouts import Layouts
    from lading.planner.refine import Refined
    from lading.planner.search import Tell
    from lading.planner.space import Ask
    from lading.report.layouts import LayoutRow

#: Options of ``lading plan`` that belong to ``--model``.
OPTIONS = (
    "machine", "devices", "global_batch", "seq", "stack", "network", "precision", "pin", "optimizer", "price", "top",
    "longest", "save", "budget", "unshard", "tree", "json",
)  # fmt: skip


#: By what layouts have rows of their own in the table, coarse to fine.
_MESH = ("dp", "tp", "cp", "pp", "ep", "etp")
_WAYS = (*_MESH, "zero", "recompute", "offload", "micro_batch", "precision")
_FINE = (*_WAYS, "vpp", "schedule", "sp", "cp_comm", "recompute_layers")
_LEVELS = (_MESH, _WAYS, _FINE, (*_FINE, "shard"))


def plan_cluster(asked: Plan) -> None:
    """Print the layouts found, and save the winner; a machine that lists unlike devices gets a placement instead."""
    if asked.machine is not None:
        from lading.catalog.fleets import lists_devices, load_fleet

        load_fleet(asked.machine)
        if lists_devices(asked.machine):
            from lading.cli.placement import plan_fleet

            return plan_fleet(asked)
    from rich.console import Console

    from lading import __version__
    from lading.clusters import update_sentence
    from lading.planner.layouts import cluster_plan, find_layouts
    from lading.report.layouts import layouts_lines

    ask = ask_of(asked)
    console = Console(highlight=False, width=line_columns())
    begun = time.perf_counter()
    with _progress() as tell:
        found = find_layouts(ask, tell)
    seconds = time.perf_counter() - begun
    alike = shown(found.best, asked.top)
    rows = [dataclasses.replace(_row(each[0], asked.price), like=like_text(*each)) for each in alike]
    over = [_row(one, asked.price) for one in found.over]
    device = ask.machine.device.name
    say(console, f"{ask.request.name} on {ask.devices:,} x {device}, {ask.global_batch:,} sequences of "
        f"{ask.request.seq_len:,} tokens a step; software stack {ask.request.stack.name}", "bold")  # fmt: skip
    title, *table = layouts_lines(rows, over, console.width)
    say(console, title, "bold")
    updated = found.winner.simulated.updated
    update = [update_sentence(ask.request.optimizer, updated.update)] if updated is not None else []
    for line in (*table, "", *update, *_said(found, seconds), *_moments(found.winner)):
        say(console, line)
    if asked.json is not None:
        from lading.files import write_text

        write_text(asked.json, json.dumps(_document(found, rows, over, asked.price), indent=1) + "\n")
    plan = unsharded(asked, found, cluster_plan(found, __version__), console)
    plan.save(asked.out)
    say(console, f"wrote {asked.out}")


def _document(
    found: Layouts, rows: Sequence[LayoutRow], over: Sequence[LayoutRow], price: float | None
) -> dict[str, Any]:
    """What is written as JSON."""
    from lading.report.layouts import layout_figures

    ask = found.ask
    return {
        "model": ask.request.name,
        "machine": ask.machine.name,
        "stack": ask.request.stack.name,
        "devices": ask.devices,
        "global_batch": ask.global_batch,
        "seq_len": ask.request.seq_len,
        "pins": dict(sorted(ask.pins.items())),
        "plans": found.counted,
        "plans_bounded_one_by_one": found.evaluated,
        "plans_simulated": found.proof.simulated,
        "proven": found.proven,
        "rest_s": found.proof.rest_s if found.proof.rest_s < float("inf") else None,
        "left_out": list(found.left_out),
        "layouts": [layout_figures(_row(one, price), rows[0]) for one in found.best],
        "over": [layout_figures(row, rows[0]) for row in over],
        "buckets": _buckets(found),
        "assumptions": list(found.winner.simulated.assumed),
    }


def _buckets(found: Layouts) -> dict[str, Any] | None:
    """Bytes of gradients that the winner reduces together, and what the best size saves against a block at a time."""
    bucket = found.bucket
    if bucket is None:
        return None
    return {
        "bytes": bucket.best_bytes if bucket.is_worth else bucket.block_bytes,
        "is_block": not bucket.is_worth,
        "best_bytes": bucket.best_bytes,
        "best_saves_s": bucket.saves_s,
        "layout": str(found.chosen.request.layout),
        "step_s": found.chosen.step.step_s,
    }


def unsharded(asked: Plan, found: Layouts, plan: ClusterPlan, console: Console) -> ClusterPlan:
    """The plan with what stays gathered where parameters are cut; prints how that was chosen."""
    from lading.planner.moment import tree_of
    from lading.planner.peaks import room_of
    from lading.planner.unshard import choose_groups, plan_of
    from lading.report.tree import print_tree
    from lading.report.unshard import unshard_table
    from lading.sim.modules import unfit

    ask = found.ask
    request = dataclasses.replace(ask.request, layout=found.winner.layout)
    if reason := unfit(request):
        if asked.unshard != "residency":
            raise ConfigError(
                f"--unshard {asked.unshard}: no plan written, as no groups of parameters are chosen: {reason}; pin "
                "zero=3 and pp=1, with offload=none or parameters, or leave --unshard out"
            )
        if asked.tree or request.layout.zero == 3:
            what = "tree" if asked.tree else "groups of parameters, which lading.apply needs"
            say(console, f"no {what}: {reason}; pin zero=3 and pp=1")
        return plan
    moments = found.winner.peaks
    grown = max(0, moments["longest"]["device"] - moments["step"]["device"])
    room = room_of(ask).device_bytes - grown
    try:
        chosen = choose_groups(request, ask.table, room, asked.unshard)
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
    if asked.tree:
        print_tree(tree_of(chosen, ask.table), console)
    own = plan_of(chosen, plan.version)
    forward, backward = own.gathers
    said = f"each rank gathers {forward} times in the forwards of a step and {backward} in the backwards"
    say(console, f"{said}; {own.gap:.1%} above the bound")
    steady = own.peaks["step"]["device"]
    longest = {**plan.peaks["longest"], "device": steady + grown}
    peaks = {**plan.peaks, "step": {**plan.peaks["step"], **own.peaks["step"]}, "longest": longest}
    return dataclasses.replace(own, peaks=peaks, assumptions=plan.assumptions)


def _instead(asked: Plan, error: PlanInfeasible, room: int) -> str:
    """Options with which there may be a plan, the surest first."""
    if error.smallest_budget_bytes <= room and asked.unshard != "residency":
        return "leave --unshard out, which finds groups that fit"
    changes = ["--pin recompute=full", "--pin mb=1", "more --devices"]
    return f"try {', '.join(changes)}, or give each device {format_bytes(error.missing_bytes)} more with --budget"


def ask_of(asked: Plan) -> Ask:
    """What the options ask for.

    Raises:
        ConfigError: one that is needed is missing, or a name is not known.
    """
    from lading.clusters import Question, request_of
    from lading.planner.space import Ask, parse_pins, precisions_of
    from lading.sim.simulate import machine_of

    if asked.model is None or asked.machine is None or asked.devices is None or asked.global_batch is None:
        missing = [name for name in ("machine", "devices", "global_batch") if getattr(asked, name) is None]
        raise ConfigError(f"expected --{' and --'.join(missing).replace('_', '-')} next to --model")
    if asked.overrides:
        raise ConfigError(f"settings replace those of a RUN.toml, got {asked.overrides[0]!r} next to --model")
    if asked.top < 1:
        raise ConfigError(f"--top: expected at least 1 layout to show, got {asked.top}")
    if asked.price is not None and asked.price < 0:
        raise ConfigError(f"--price: expected a price of a device for an hour, 0 or more, got {asked.price:g}")
    if asked.budget is not None and parse_bytes(asked.budget, "--budget") < 1:
        raise ConfigError(f"--budget: expected memory of a device, such as 40GB, got {asked.budget!r}")
    pins = parse_pins(asked.pin)
    question = Question(
        model=asked.model, machine=asked.machine, seq_len=asked.seq or 0, stack=asked.stack or "default",
        network=asked.network or "", optimizer=asked.optimizer or "adamw",
    )  # fmt: skip
    request, table = request_of(question)
    machine = machine_of(request)
    return Ask(
        request=request,
        table=table,
        machine=machine,
        precisions=precisions_of(asked.precision, machine, request.stack) if asked.precision else (),
        devices=asked.devices,
        global_batch=asked.global_batch,
        pins=pins,
        longest=asked.longest or 0,
        save=asked.save,
        top=max(Ask.top, asked.top),
        budget_bytes=parse_bytes(asked.budget, "--budget") if asked.budget else 0,
    )


@contextmanager
def _progress() -> Generator[Tell, None, None]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda done, of, what: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("pricing")
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)


def shown(best: Sequence[Refined], most: int) -> list[list[Refined]]:
    """Up to so many rows of layouts that are alike, each with the fastest first.

    Alike are those of one mesh; if these are too few rows, those that also save memory in the same ways; and only where
    all of them are alike so, what is finer counts.

    Args:
        best: The fastest first.
    """
    levels: list[list[list[Refined]]] = []
    for keys in _LEVELS:
        rows: dict[Hashable, list[Refined]] = {}
        for one in best:
            rows.setdefault(tuple(getattr(one.layout, key) for key in keys), []).append(one)
        levels.append(list(rows.values()))
    enough = [rows for rows in levels[:2] if len(rows) >= most]
    several = [rows for rows in levels[1:] if len(rows) > 1]
    return (enough or several or levels[-1:])[0][:most]


def like_text(one: Refined, *others: Refined) -> str:
    """How many layouts are shown by one, how much slower they are, and by what they differ."""
    if not others:
        return ""
    names = [field.name for field in dataclasses.fields(one.layout)]
    own = [name for name in names if any(getattr(o.layout, name) != getattr(one.layout, name) for o in others)]
    slower = max(other.step_s for other in others) / one.step_s - 1
    speed = f"up to {slower:.1%} slower" if slower >= 5e-4 else "as fast"
    return f"{len(others)} variant{'s' if len(others) > 1 else ''} {speed} ({', '.join(own)})"


def _row(one: Refined, price_per_hour: float | None) -> LayoutRow:
    from lading.clusters import summary
    from lading.report.layouts import LayoutRow

    figures = summary(one.simulated, price_per_hour)
    return LayoutRow(
        layout=str(one.layout),
        step_s=one.step_s,
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
    """What does not fit, and by how much: "activation 12 GB over"."""
    moment, tier, _ = one.binding
    fullest: dict[Any, int] = max(one.simulated.memory, key=lambda roles: sum(roles.values()))
    role = max(fullest, key=lambda name: fullest[name]) if moment == "step" else f"{tier} at moment {moment}"
    return f"{role} {format_bytes(one.over_bytes)} over"


def _said(found: Layouts, seconds: float) -> list[str]:
    """How much was searched, and what is proven."""
    proof, winner = found.proof, found.winner
    lines = [
        f"{found.counted:,} plans in {seconds:.1f} s: {found.evaluated:,} bounded one by one, the others with their "
        f"block; {proof.simulated:,} simulated by events"
    ]
    if found.proven:
        lines.append(f"proven: no plan of the space that fits is faster as simulated, nor comes before the first "
                     f"{found.proven} of {len(found.best)}")  # fmt: skip
    else:
        gap = 1 - proof.rest_s / winner.step_s
        lines.append(f"not proven: plans that were not simulated take at least {format_seconds(proof.rest_s)}, "
                     f"{gap:.2%} less than the first")  # fmt: skip
    if found.bucket is not None:
        lines.append(str(found.bucket))
    lines += [f"not searched - {sentence}" for sentence in found.left_out]
    return lines + [f"assumed - {sentence}" for sentence in winner.simulated.assumed]


def _moments(winner: Refined) -> list[str]:
    """The five peaks of the winner."""
    moment, tier, share = winner.binding
    each = [
        f"{name} {format_bytes(tiers['device'])}" + (f" + host {format_bytes(tiers['host'])}" if tiers["host"] else "")
        for name, tiers in winner.peaks.items()
    ]
    return [f"memory: {', '.join(each)}", f"binding: {tier} at moment {moment!r}, {share:.0%} of what there is"]

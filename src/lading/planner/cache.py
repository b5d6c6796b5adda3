"""Plans made before, in the user's cache folder, each under a name that hashes all that it depends on.

That is the graph, the machine, what was asked (budgets, policy, settings, scratch) and what makes plans: the source of
Lading, and the versions of the libraries that solve and count. So nothing is ever out of date, and a plan taken from
here equals the plan that would be made. A file is read and verified like any saved plan; one that is damaged is said,
and planned anew. The files used longest ago go first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Required, TypedDict, Unpack

from lading import __version__
from lading.errors import ConfigError, LadingError, PlanInfeasible, StorageError
from lading.files import home_cache, make_folder, remove_file
from lading.ir.graph import StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Plan
from lading.ir.program import PAGE_BYTES, Homes
from lading.ir.reporting import SILENT, PlanProgress
from lading.memory.restore import restore_program
from lading.memory.tier_layout import homes_of
from lading.planner.api import DEFERS, Planned, keep_all_bytes, make_plan
from lading.planner.policies import Policy
from lading.planner.residency import SMALLEST
from lading.units import format_bytes, share_or_bytes

#: Most bytes of plans that stay.
FOLDER_BYTES = 64 << 20
#: Times that values are given less room on the device, where another step beside them does not fit.
_TRIES = 6


class Asked(TypedDict, total=False):
    """Keyword arguments of ``make_plan`` that, with graph and machine, decide the plan: the key of the cache."""

    budget: Required[str | float]
    budgets: Mapping[str, str | float]
    policy: str | Policy
    expansion: Mapping[str, float]
    workspace_bytes: Sequence[int]
    homes: Homes | None


def cache_folder() -> Path | None:
    """Folder that plans are kept in, ``lading/plans`` in the user's cache; None without one: nothing is kept."""
    base = home_cache()
    return None if base is None else base / "lading" / "plans"


def cached_plan(
    graph: StepGraph,
    machine: Machine,
    *,
    folder: Path | None,
    progress: PlanProgress = SILENT,
    others: Sequence[tuple[StepGraph, Sequence[int]]] = (),
    **asked: Unpack[Asked],
) -> Planned:
    """Take a plan from the cache, or make and keep it; what comes from there, or cannot be kept, is said.

    Args:
        graph, machine, asked: As of ``make_plan``. What a function does is not known, so its plans are not kept.
        folder: Folder of the cache; None makes the plan in any case and keeps nothing.
        progress: Is told what is being done.
        others: Further steps over the values of ``graph`` (``lading.ir.together``), each with the scratch of its
            operations: planned within the same budgets, on values where the first plan has them. A budget that is a
            share is then one of what the largest of all needs.

    Raises:
        PlanInfeasible, ConfigError: as ``make_plan``.
    """
    if not others:
        return _cached(graph, machine, folder, progress, asked)
    expansion = dict(asked.get("expansion", {}))
    if any(step.trains for step, _ in others):
        expansion[DEFERS] = 0.0
    steps = ((graph, asked.get("workspace_bytes", ())), *others)
    needs = [keep_all_bytes(step, machine, scratch, expansion) for step, scratch in steps]
    limit = share_or_bytes(asked["budget"], max(needs))
    # where values are is for the step to say that has least room for them
    lead = max((number for number, (step, _) in enumerate(steps) if step.trains), key=needs.__getitem__)

    def planned(number: int, budget: int, homes: Homes | None) -> Planned:
        step, scratch = steps[number]
        of_step: Asked = {"expansion": expansion, "budget": f"{budget}B", "workspace_bytes": scratch, "homes": homes}
        return _cached(step, machine, folder, progress, {**asked, **of_step})

    try:
        mine, *rest = _within(limit, planned, lead, len(steps))
    except PlanInfeasible as error:
        mine, *rest = _least(limit, planned, lead, len(steps), error)
    return Planned(
        dataclasses.replace(mine.plan, others=tuple(other.plan for other in rest)),
        mine.program,
        tuple(other.program for other in rest),
    )


def _within(limit: int, planned: Callable[[int, int, Homes | None], Planned], lead: int, count: int) -> list[Planned]:
    """Plan steps over the same values within one limit, those of the lead with less where the others need the room.

    Args:
        limit: Bytes.
        planned: Plans a step by its number, within some bytes, on values where they are said to be.
        lead: Number of the step that says where values are.
        count: Number of steps.

    Raises:
        PlanInfeasible: no room was found in some tries.
    """

    def leaving(enough: int, less: int) -> tuple[Planned, int]:
        """Plan the lead in ``less`` bytes below the limit, or as near to that as it fits, but above ``enough``."""
        while True:
            try:
                return planned(lead, limit - less, None), less
            except PlanInfeasible:
                if less - enough <= PAGE_BYTES:
                    raise
                less = (enough + less) // 2

    first, less = planned(lead, limit, None), 0
    for attempt in range(_TRIES):
        homes = homes_of(first.program)
        try:
            return [first if n == lead and not less else planned(n, limit, homes) for n in range(count)]
        except PlanInfeasible as error:
            if attempt == _TRIES - 1:
                raise
            more = 2 * less + error.missing_bytes + PAGE_BYTES  # room for the others
            first, less = leaving(less, min(more, max(less, limit - PAGE_BYTES)))
    raise AssertionError("the last try returns or raises")


def _least(
    limit: int, planned: Callable[[int, int, Homes | None], Planned], lead: int, count: int, error: PlanInfeasible
) -> list[Planned]:
    """Plan steps over the same values with the lead in the least bytes that it fits into; arguments as of ``_within``.

    Args:
        error: Error of ``_within``, which is of one step alone, and may be of a budget below the limit.

    Raises:
        PlanInfeasible: they do not fit even so; says what binds, and the smallest budget for all.
    """
    try:
        needs = [_needs(planned, lead, None)]
        tight = planned(lead, needs[0][0], None)
    except (PlanInfeasible, ConfigError):  # a policy that needs as much whatever the budget, or a tier that is full
        raise error from None
    homes, others = homes_of(tight.program), [number for number in range(count) if number != lead]
    needs += [_needs(planned, number, homes) for number in others]
    least, words = max(needs, key=lambda need: need[0])
    if least <= limit:
        return [tight if number == lead else planned(number, limit, homes) for number in range(count)]
    missing = least - limit
    lines = [line for line in words.splitlines()[1:] if not line.startswith(SMALLEST)]
    first = (
        f"no plan of the step and its {len(others)} others fits a device budget of {format_bytes(limit)}: "
        f"{format_bytes(missing)} are missing."
    )
    text = "\n".join((first, *lines, f"{SMALLEST}{least} bytes ({format_bytes(least)}); less may do."))
    raise PlanInfeasible(text, missing_bytes=missing, smallest_budget_bytes=least) from error


def _needs(planned: Callable[[int, int, Homes | None], Planned], number: int, homes: Homes | None) -> tuple[int, str]:
    """Smallest budget in bytes that a step has a plan for, and what binds, as the error of a budget of a page says."""
    try:
        planned(number, PAGE_BYTES, homes)
    except PlanInfeasible as error:
        return error.smallest_budget_bytes, f"{error}"
    return PAGE_BYTES, ""


def _cached(graph: StepGraph, machine: Machine, folder: Path | None, progress: PlanProgress, asked: Asked) -> Planned:
    if folder is None or not isinstance(asked.get("policy", ""), str):
        return make_plan(graph, machine, **asked, progress=progress)
    path = folder / f"{_key(graph, machine, asked)}.json"
    try:
        if path.is_file():
            progress.update(0.0, "a plan of the cache")
            plan = Plan.load(path)
            planned = Planned(plan, restore_program(plan, graph, machine))
            with suppress(OSError):  # another process let go of it, or it may be read and not touched
                os.utime(path)  # used now
            progress.note(f"plan of an equal run before, from the cache: {path}")
            return planned
    except (LadingError, OSError) as error:
        progress.note(f"the plan in the cache cannot be used, planning anew: {error}")
    planned = make_plan(graph, machine, **asked, progress=progress)
    try:
        _write(path, planned.plan)
    except (StorageError, OSError) as error:
        progress.note(f"the plan is not kept in the cache: {error}")
    return planned


def _key(graph: StepGraph, machine: Machine, asked: Asked) -> str:
    """Hash all that a plan depends on, as the name of its file."""
    made_by = (__version__, _source_hash(), version("numpy"), version("highspy"))
    given = {
        **asked,
        "budgets": sorted(asked.get("budgets", {}).items()),
        "expansion": sorted(asked.get("expansion", {}).items()),
    }
    workspace = tuple(asked.get("workspace_bytes", ()))
    what = (
        graph.fingerprint,
        graph.blocks,
        machine.fingerprint,
        sorted({**given, "workspace_bytes": workspace}.items()),
    )
    return hashlib.sha256(repr((made_by, what)).encode()).hexdigest()[:32]


def _source_hash() -> str:
    """Hash the source of Lading."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _write(path: Path, plan: Plan) -> None:
    """Write a plan whole, and delete the plans used longest ago.

    Raises:
        StorageError: the folder cannot be written.
        OSError: it cannot be listed.
    """
    make_folder(path.parent)
    plan.save(path)
    files: list[tuple[int, int, Path]] = []
    for other in path.parent.iterdir():
        with suppress(FileNotFoundError):  # another process let go of it
            stat = other.stat()
            files.append((-stat.st_mtime_ns, stat.st_size, other))
    total = 0
    for _, size, other in sorted(files):
        total += size
        if total > FOLDER_BYTES and other != path:
            remove_file(other)

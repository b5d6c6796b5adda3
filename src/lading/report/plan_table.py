"""Plans as tables for the terminal, and modules with their operations and tensors as a tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lading.ir.graph import StepGraph
from lading.ir.plan import Plan, PolicyRow
from lading.ir.reporting import Branch, UnshardRow
from lading.report.figures import placement, role_names, role_title
from lading.report.lines import say_list
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.tree import Tree


def figures_table(title: str, *columns: str, texts: Sequence[str] = ()) -> Table:
    """Make a table of figures; its first column and ``texts`` are text, broken where a line is too narrow."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.padding = False, 0
    for number, column in enumerate(columns):
        is_text = not number or column in texts
        table.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def _with_caption(table: Table, caption: str) -> Table:
    table.caption, table.caption_justify = caption, "left"
    return table


def policy_table(plan: Plan) -> Table:
    """Table of all policies side by side, the chosen one marked; notes, the lower bound and the gap beneath."""
    from rich.markup import escape

    table = figures_table("Policies", "policy", "step", "peak", "recompute", "stall", "moved")
    predictions = plan.predictions
    for row in predictions.policies:
        chosen = row.policy == plan.request.policy
        _, step, *others = policy_cells(row)[:-2]
        moved_bytes = sum(row.moved_bytes.values())
        name = f"{'>' if chosen else ' '} {row.policy}"
        cells = [name, step if row.fits else "does not fit", *others, format_bytes(moved_bytes) if moved_bytes else "-"]
        table.add_row(*map(escape, cells), style="bold" if chosen else None)
    lines = [f"{row.policy}: {escape(row.note)}" for row in predictions.policies if row.note and row.fits]
    bound = f"no plan takes less than {format_seconds(plan.lower_bound_s)}; this one is {plan.gap:.1%} above"
    lines.append(bound if plan.lower_bound_s else "no bound on the step time is known")
    return _with_caption(table, "\n".join(lines))


def policy_cells(row: PolicyRow) -> list[str]:
    """Write a policy's row without its name: whether it fits, step, peak, recomputing, stalls, bytes moved, note."""
    moved_text = "\n".join(f"{name} {format_bytes(size)}" for name, size in row.moved_bytes.items() if size)
    return [
        "yes" if row.fits else "no",
        "-" if row.step_s is None else format_seconds(row.step_s),
        format_bytes(row.peak_bytes),
        format_seconds(row.recompute_s) if row.recompute_s else "-",
        format_seconds(row.stall_s) if row.stall_s else "-",
        moved_text or "-",
        row.note,
    ]


def limits_table(plan: Plan) -> Table:
    """Table of what a step takes of each resource at least, the one that binds first, and the planned step beside."""
    table = figures_table("Limit of a step", "resource", "has to move", "at least", "planned above it")
    for number, limit in enumerate(plan.limits):
        moves = format_bytes(limit.size_bytes) if limit.size_bytes else "-"
        above = f"{plan.step_s / limit.seconds - 1.0:.1%}"
        style = None if number else "bold"
        table.add_row(limit.resource, moves, format_seconds(limit.seconds), above, style=style)
    binds = plan.limits[0].resource
    return _with_caption(table, f"{binds} binds; each by itself, at the rates of this machine, inside this budget")


def placement_table(plan: Plan, graph: StepGraph) -> Table:
    """Table of the bytes of each role under each option."""
    table = figures_table("What goes where between uses", "role", "total", *plan.options)
    for role, options in placement(plan, graph).items():
        total = graph.bytes_of_role(role)
        cells = [format_bytes(p.size_bytes) if p.size_bytes else "-" for p in options.values()]
        table.add_row(role_title(role), format_bytes(total), *cells)
    return table


def fit_table(peak_bytes: Mapping[str, int], budgets: Mapping[str, int], bytes_by_role: Mapping[str, int]) -> Table:
    """Table of what each tier has and takes, and what fills the device at its peak.

    Args:
        peak_bytes: Predicted peak of each tier.
        budgets: Bytes allowed in each tier; a tier without one is shown as unlimited.
        bytes_by_role: Bytes of each role on the device at its peak.
    """
    table = figures_table("Does it fit", "tier", "needed", "allowed", "used", "spare", "fits")
    for tier, needed_bytes in peak_bytes.items():
        if (allowed := budgets.get(tier)) is None:
            table.add_row(tier, format_bytes(needed_bytes), "unlimited", "-", "-", "yes")
            continue
        share = f"{needed_bytes / allowed:.1%}" if allowed else "-"
        fits = needed_bytes <= allowed
        cells = (format_bytes(needed_bytes), format_bytes(allowed), share, format_bytes(allowed - needed_bytes))
        table.add_row(tier, *cells, "yes" if fits else "no", style=None if fits else "red")
    roles = [f"{role_title(r)} {format_bytes(bytes_by_role[r])}" for r in role_names(set(bytes_by_role))]
    return _with_caption(table, "at the device's peak: " + (", ".join(roles) or "nothing"))


def print_plan(plan: Plan, graph: StepGraph, console: Console) -> None:
    """Print the whole bill of lading: fit, policies, placement, assumptions."""
    console.print(fit_table(plan.peak_bytes, plan.budgets, plan.predictions.bytes_by_role))
    console.print(policy_table(plan))
    if plan.limits:
        console.print(limits_table(plan))
    console.print(placement_table(plan, graph))
    say_list(console, "Assumed", plan.assumptions)


def unshard_table(rows: Sequence[UnshardRow], chosen: str, bound_s: float, budget_bytes: int) -> Table:
    """Table of policies side by side, the chosen one marked."""
    title = f"What stays gathered in {format_bytes(budget_bytes)}; no choice is faster than {format_seconds(bound_s)}"
    table = figures_table(title, "policy", "step", "waits", "peak", "of budget", "groups", "gathers", "above bound")
    for row in rows:
        above = f"{row.gap:.1%}" if row.gap is not None else "does not fit"
        table.add_row(
            f"{row.policy} *" if row.policy == chosen else row.policy,
            format_seconds(row.step_s),
            format_seconds(row.exposed_s),
            format_bytes(row.peak_bytes),
            f"{row.fill:.1%}",
            str(row.buckets),
            f"{row.gathers[0]} + {row.gathers[1]}",
            above,
            style="bold" if row.policy == chosen else None,
        )
    return table


#: Columns of states, in order: what a rank keeps, what is gathered or on its way, gradients, what is being reduced,
#: what lies in host memory, activations.
STATES = ("sharded", "gathered", "coming", "gradients", "in reduction", "moved", "kept")
_STYLES = {"module": "bold", "operation": "", "tensor": "dim"}


def print_tree(root: Branch, console: Console, *, depth: int = 99) -> None:
    """Print a tree; branches deeper than ``depth``, and those of a block like one before, are summed up.

    Lines that are too long for the console go on below themselves.
    """
    from rich.tree import Tree

    shown, forms = Tree(_line(root)), set[object]()
    for branch in root.children:
        form = _form(branch, top=True)
        _grow(shown.add(_line(branch)), () if form in forms else branch.children, depth - 2)
        forms.add(form)
    console.print(shown)


def _grow(tree: Tree, branches: Iterable[Branch], depth: int) -> None:
    if depth < 0:
        return
    for branch in branches:
        _grow(tree.add(_line(branch)), branch.children, depth - 1)


def _form(branch: Branch, *, top: bool = False) -> object:
    """Key that is equal for blocks that differ in their place and group only."""
    below = tuple(_form(child) for child in branch.children)
    return "" if top else branch.name, branch.kind, tuple(branch.states.items()), below


def _line(branch: Branch) -> str:
    from rich.markup import escape

    style = _STYLES[branch.kind]
    name = f"[{style}]{escape(branch.name)}[/{style}]" if style else escape(branch.name)
    total = branch.total
    sizes = [f"{state} {format_bytes(total[state])}" for state in STATES if total.get(state)]
    count_text = f" x {branch.num_equal}" if branch.num_equal > 1 else ""
    note = f" [dim]{escape(branch.note)}[/dim]" if branch.note else ""
    return f"{name}{count_text}{note}" + (f": {', '.join(sizes)}" if sizes else "")

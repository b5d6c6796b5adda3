"""Tree: modules, their operations and the tensors of these, with what each has in memory at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lading.ir.reporting import Branch
from lading.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

#: Columns of states, in order: what a rank keeps, what is gathered or on its way, gradients, what is being reduced,
#: what lies in host memory, activations.
STATES = ("sharded", "gathered", "coming", "gradients", "in reduction", "moved", "kept")
_STYLES = {"module": "bold", "operation": "", "tensor": "dim"}


def print_tree(root: Branch, console: Console, *, depth: int = 99) -> None:
    """Print a tree; branches deeper than ``depth``, and those of a block like one before, are summed up.

    Lines that are too long for the console go on below themselves.
    """
    from rich.tree import Tree

    shown, seen = Tree(_line(root)), set[object]()
    for branch in root.below:
        form = _form(branch, top=True)
        _grow(shown.add(_line(branch)), () if form in seen else branch.below, depth - 2)
        seen.add(form)
    console.print(shown)


def _grow(tree: Tree, branches: Iterable[Branch], depth: int) -> None:
    if depth < 0:
        return
    for branch in branches:
        _grow(tree.add(_line(branch)), branch.below, depth - 1)


def _form(branch: Branch, *, top: bool = False) -> object:
    """Key that is equal for blocks that differ in their place and group only."""
    below = tuple(_form(each) for each in branch.below)
    return "" if top else branch.name, branch.kind, tuple(branch.states.items()), below


def _line(branch: Branch) -> str:
    from rich.markup import escape

    style = _STYLES[branch.kind]
    name = f"[{style}]{escape(branch.name)}[/{style}]" if style else escape(branch.name)
    total = branch.total
    sizes = [f"{state} {format_bytes(total[state])}" for state in STATES if total.get(state)]
    alike = f" x {branch.alike}" if branch.alike > 1 else ""
    note = f" [dim]{escape(branch.note)}[/dim]" if branch.note else ""
    return f"{name}{alike}{note}" + (f": {', '.join(sizes)}" if sizes else "")

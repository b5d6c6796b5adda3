"""Count what a newcomer to the package meets: ``python -m tools.figures [--names] [FOLDER]``.

Everything is read from the source by ``ast``; nothing is imported. An import is one of a module by another at any
depth, those for type checkers included. Modules that are named in a string (``import_module("lading.optim")``,
``"lading.models.gpt:GPT"``) count as imported by the module that holds the string.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "lading"
#: Modules that users start from: the command line and the public names.
ROOTS = frozenset({f"{PACKAGE}.cli.main", PACKAGE})
#: What stands in each file that has to be touched to add another of its kind: a tier, an optimizer, a collective.
KINDS = {
    "files that name a tier": re.compile(r'"(disk|host)"'),
    "files that name an optimizer (SOAP)": re.compile("soap", re.IGNORECASE),
    "files that name a collective (reduce-scatter)": re.compile('"reduce_scatter"'),
}
#: First words of a docstring that say a property of a subject that is not there.
OPENINGS = ("Of", "That", "What", "Whose", "The same", "By")
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True)
class Module:
    """One file of the package.

    Attributes:
        name: Dotted name; an ``__init__.py`` has its folder's.
        path: Path of the file.
        text: Content of the file.
        tree: Syntax tree of the text.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Nodes of the tree that a figure counts."""
        kinds = (ast.Module, ast.Import, ast.ImportFrom, ast.Constant, *_DEFINITIONS)
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """First folder below the package, or the module's own name where it lies in none."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]


def read_package(folder: Path) -> dict[str, Module]:
    """Parse the modules of the package below ``folder``, by dotted name."""
    modules: dict[str, Module] = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name=name, path=path, text=text, tree=ast.parse(text))
    return modules


def imports_of(module: Module, modules: dict[str, Module]) -> set[str]:
    """Modules that ``module`` imports; ``from a.b import c`` counts as ``a.b.c`` where that is a module."""
    targets: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                targets.add(below if below in modules else node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            targets.add(node.value.partition(":")[0])
    return {name for name in targets if name in modules and name not in {module.name, PACKAGE}}


def reached_from(roots: Set[str], edges: dict[str, set[str]]) -> set[str]:
    """Modules that ``roots`` import, directly or not, and the roots."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += edges[name]
    return reached


def public_names(module: Module) -> list[str]:
    """Classes, functions and constants without an underscore that a file defines at its top."""
    names: list[str] = []
    for node in module.tree.body:
        if isinstance(node, _DEFINITIONS):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def classes_of(module: Module) -> list[str]:
    """Names of all classes of a file, nested ones too."""
    return [node.name for node in module.nodes if isinstance(node, ast.ClassDef)]


def docstrings(module: Module) -> Iterator[tuple[str, str]]:
    """Name and docstring of the file and of each class and function in it that has one."""
    for node in module.nodes:
        if isinstance(node, (ast.Module, *_DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield module.name if isinstance(node, ast.Module) else f"{module.name}.{node.name}", text


def opening(text: str) -> str | None:
    """Opening of ``OPENINGS`` that a docstring or a line of attributes has."""
    return next((word for word in OPENINGS if re.match(rf"{word}\b", text)), None)


def attribute_lines(text: str) -> Iterator[str]:
    """Yield the description of each argument or attribute in a docstring: of ``name: This text``, the text."""
    _, _, listed = text.partition("\n")
    for line in listed.splitlines():
        if match := re.match(r"\s+\w+: (.*)", line):
            yield match.group(1)


def figures(modules: dict[str, Module]) -> dict[str, list[str]]:
    """Count everything: a figure's name, and the names of what it counts."""
    edges = {name: imports_of(module, modules) for name, module in modules.items()}
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            importers[target].add(name)
    reached = reached_from(ROOTS & modules.keys(), edges)
    files = [module for module in modules.values() if not module.is_package]
    across = [
        f"{modules[name].folder} -> {modules[target].folder}"
        for name, targets in edges.items()
        for target in targets
        if modules[name].folder != modules[target].folder and name != PACKAGE
    ]
    classes = [(name, module.name) for module in modules.values() for name in classes_of(module)]
    stems = Counter(module.path.stem for module in files)
    times = Counter(name for name, _ in classes)
    texts = [pair for module in modules.values() for pair in docstrings(module)]
    lines = [(name, line) for name, text in texts for line in attribute_lines(text)]
    counted = {
        "files": [module.name for module in modules.values()],
        "public names": [f"{module.name}.{name}" for module in modules.values() for name in public_names(module)],
        "classes": [f"{where}.{name}" for name, where in classes],
        "modules with one importer": [
            f"{module.name} <- {next(iter(importers[module.name]))}"
            for module in files
            if len(importers[module.name]) == 1
        ],
        "modules that nothing reaches": [
            f"{module.name} ({module.num_lines} lines)"
            for module in files
            if module.name not in reached and module.path.stem != "__main__"
        ],
        "imports between folders": across,
        "pairs of folders, one importing the other": sorted(set(across)),
        "classes of a name that another has": sorted(f"{name}: {where}" for name, where in classes if times[name] > 1),
        "files of a name that another has": sorted(
            f"{module.path.stem}: {module.name}" for module in files if stems[module.path.stem] > 1
        ),
    }
    for kind, pattern in KINDS.items():
        counted[kind] = [module.name for module in modules.values() if pattern.search(module.text)]
    for word in OPENINGS:
        counted[f'docstrings that open with "{word}"'] = [name for name, text in texts if opening(text) == word]
    counted['attributes\' lines that open with "Of", "That", "The same" or "By"'] = [
        f"{name}: {line}" for name, line in lines if opening(line) in {"Of", "That", "The same", "By"}
    ]
    return counted


def main() -> None:
    """Print the figures, and with ``--names`` what each counts."""
    parser = argparse.ArgumentParser(description="Count what a newcomer to the package meets.")
    parser.add_argument("folder", nargs="?", default=f"src/{PACKAGE}", type=Path, help="folder of the package")
    parser.add_argument("--names", metavar="FIGURE", help="list what the figures count whose name holds this text")
    args = parser.parse_args()
    modules = read_package(args.folder)
    print(f"{sum(module.num_lines for module in modules.values()):8,}  lines")
    for name, counted in figures(modules).items():
        print(f"{len(counted):8,}  {name}")
        if args.names and args.names in name:
            print("".join(f"          {line}\n" for line in counted), end="")


if __name__ == "__main__":
    main()

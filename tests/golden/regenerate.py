"""Write the goldens again: ``python -m tests.golden.regenerate [PART ...]``, from the repository's root.

Parts: layouts, sequences, pipelines, gathered, rows, searches, programs, and the slow ones: leaderboard and
large-searches. Without a name all are written, which takes minutes. A commit that changes a golden says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from tests.golden import layouts, published, ranks, steps
from tests.golden.store import write_json, write_text


def _layouts() -> None:
    write_json("layouts.json", {name: layouts.figures(name) for name in layouts.CASES})


def _sequences() -> None:
    for name, case in ranks.SEQUENCES.items():
        write_text(f"sequences/{name}.txt", case.text())


def _pipelines() -> None:
    write_json("pipelines.json", {name: ranks.pipeline(name) for name in ranks.PIPELINES})


def _gathered() -> None:
    write_json("gathered.json", {name: ranks.gathered(name) for name in ranks.UNSHARDED})


def _rows() -> None:
    write_json("rows.json", published.some_rows())


def _searches() -> None:
    write_json("searches.json", {name: published.searched(*asked) for name, asked in published.SEARCHES.items()})


def _programs() -> None:
    torch.set_num_threads(1)
    for name in steps.CASES:
        write_text(f"programs/{name}.txt", steps.planned_text(name))
    write_json("timelines.json", {name: steps.timeline(name, steps.planned(name).program) for name in steps.CASES})
    write_json("compared.json", {name: steps.compared(name) for name in steps.CASES})


def _leaderboard() -> None:
    write_json("leaderboard.json", published.leaderboard())


def _large_searches() -> None:
    found = {name: published.searched(*asked) for name, asked in published.LARGE_SEARCHES.items()}
    write_json("large_searches.json", found)


PARTS: dict[str, Callable[[], None]] = {
    "layouts": _layouts,
    "sequences": _sequences,
    "pipelines": _pipelines,
    "gathered": _gathered,
    "rows": _rows,
    "searches": _searches,
    "programs": _programs,
    "leaderboard": _leaderboard,
    "large-searches": _large_searches,
}


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    asked = parser.parse_args().parts or list(PARTS)
    if unknown := set(asked) - PARTS.keys():
        parser.error(f"expected parts among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for name in asked:
        PARTS[name]()


if __name__ == "__main__":
    main()

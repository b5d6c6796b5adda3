"""What the pages of docs/ say works: their Python runs, their settings load."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lading.cli.main import main
from lading.config import load_run

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    """Code of a page's blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run one after another, as one reader would type them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_the_settings_of_a_page_load(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        (tmp_path / "run.toml").write_text(block)
        assert load_run(tmp_path / "run.toml").optimization.steps > 0


def test_every_page_is_in_the_contents() -> None:
    contents = (DOCS / "index.md").read_text().split()
    assert {page.stem for page in PAGES if page.stem != "index"} <= set(contents)


def test_every_key_has_a_meaning() -> None:
    sys.path.insert(0, str(DOCS))
    import reference

    table = reference.keys()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.rstrip(" |").endswith("|")] == []
    assert "`budget`" in table


@pytest.mark.slow
def test_the_first_run_of_a_stranger_fits_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(blocks(DOCS / "install.md", "toml")[0])
    assert main(["train", "run.toml", "optimization.steps=2"]) == 0
    assert main(["train", "run.toml", "--resume", "optimization.steps=4"]) == 0
    assert main(["report", "out/first"]) == 0


def test_commands_that_name_a_file_beside_them_find_it() -> None:
    """The ``lading`` script, unlike ``python -m lading``, has not the working directory on its path."""
    pages = [*Path(__file__).parents[1].glob("docs/*.md"), *Path(__file__).parents[1].glob("examples/*.py")]
    lines = [line.strip() for page in pages for line in page.read_text().splitlines()]
    named = [line for line in lines if re.match(r"(PYTHONPATH=\. )?lading .*(--model |model\.name=)\w+:\w+", line)]
    assert len(named) >= 4
    assert [line for line in named if not line.startswith("PYTHONPATH=. ")] == []

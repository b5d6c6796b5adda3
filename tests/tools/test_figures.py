"""The figures count what stands in a package: here one made for it, then Lading's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.figures import figures as counted
from tools.figures import read_package

import lading
from tools import figures

FILES = {
    "__init__.py": '_DEFINED_IN = {"run": "lading.run"}\n',
    "run.py": "import lading.parts.used\n\n\ndef run() -> None:\n    from lading.parts import lazy\n",
    "parts/__init__.py": "",
    "parts/used.py": "LIMIT = 3\n_HIDDEN = 4\n\n\nclass Kind:\n"
    '    """Of a thing.\n\n    Attributes:\n        a: That.\n    """\n',
    "parts/lazy.py": '"""By name."""\n\nfrom lading.parts.used import Kind\nfrom lading.run import run\n',
    "parts/run.py": 'class Kind:\n    """A kind."""\n',
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "lading" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "lading"


def test_a_package_is_counted(package: Path) -> None:
    of = counted(read_package(package))
    assert of["modules that nothing reaches"] == ["lading.parts.run (2 lines)"]
    assert of["modules with one importer"] == ["lading.parts.lazy <- lading.run"]
    assert of["imports between folders"] == ["parts -> run", "run -> parts", "run -> parts"]
    assert of["public names"] == [
        f"lading.{name}" for name in ("parts.run.Kind", "parts.used.LIMIT", "parts.used.Kind", "run.run")
    ]
    assert of["classes of a name that another has"] == ["Kind: lading.parts.run", "Kind: lading.parts.used"]
    assert of["files of a name that another has"] == ["run: lading.parts.run", "run: lading.run"]
    assert of['docstrings that open with "Of"'] == ["lading.parts.used.Kind"]
    assert of['docstrings that open with "By"'] == ["lading.parts.lazy"]
    assert [line for key, lines in of.items() if key.startswith("attributes") for line in lines] == [
        "lading.parts.used.Kind: That."
    ]


def test_the_table_is_printed(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["figures", str(package), "--names", "reaches"])
    figures.main()
    out = capsys.readouterr().out
    assert "       6  files" in out
    assert "lading.parts.run (2 lines)" in out


def test_names_and_docstrings_of_lading_stand_alone() -> None:
    of = counted(read_package(Path(str(lading.__file__)).parent))
    assert of["classes of a name that another has"] == []
    assert of["files of a name that another has"] == []
    assert {key: names for key, names in of.items() if " open with " in key and names} == {}
    assert of["modules that nothing reaches"] == []

"""Files that a command reads run no code and lead nowhere, unless the command line says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path

import pytest
from tests.machines import small_machine
from tests.plans import placed_plan, some_plan
from tests.runs import RUN

from lading.catalog.load import machine_to_toml, save_machine
from lading.cli.main import main, parse
from lading.errors import ConfigError
from lading.ir.machine import Tier
from lading.memory.restore import planned_optimizer
from lading.permissions import Permissions, check_code, check_path, granting, permissions_of
from lading.runtime.cuda import device_of
from lading.runtime.host_arena import Arena
from lading.runtime.tiers import open_tier

#: A module that says when it is imported, and calls itself anything that a file may ask for.
CODE = "import pathlib\npathlib.Path(__file__).with_name('imported').write_text('')\ndef make(*_, **__): pass\n"
NAME = "code_of_a_stranger:make"
NOTHING = Permissions(everything=False)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run and a machine, that Python imports modules from, while something else is worked in."""
    folder, work = tmp_path / "stranger", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    (folder / "code_of_a_stranger.py").write_text(CODE)
    (folder / "run.toml").write_text(RUN.format(root=folder))
    save_machine(small_machine(), folder / "machine.toml")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(work)
    yield folder
    sys.modules.pop("code_of_a_stranger", None)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and error of a command, as a user has them: nothing is granted beforehand."""
    code = Context().run(main, argv)
    return code, " ".join(capsys.readouterr().err.split())


def changed(folder: Path, old: str, new: str) -> None:
    text = (folder / "run.toml").read_text()
    assert old in text
    (folder / "run.toml").write_text(text.replace(old, new))


IN_A_RUN = [
    ('name = "gpt", sizes', f'name = "{NAME}", sizes', "model.name"),
    ("steps = 40,", f'steps = 40, optimizer = {{ rule = "{NAME}" }},', "optimization.optimizer.rule"),
    (
        "steps = 40,",
        f'steps = 40, optimizer = {{ rule = "torch", optimizer = "{NAME}" }},',
        "optimization.optimizer.optimizer",
    ),
    ("steps = 40,", f'steps = 40, matrices = {{ rule = "{NAME}", lr = 0.1 }},', "optimization.matrices.rule"),
]


@pytest.mark.parametrize(("old", "new", "where"), IN_A_RUN)
def test_a_run_imports_no_code(
    stranger: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, where: str
) -> None:
    changed(stranger, old, new)
    (stranger / "text").write_text("Some text to train on. " * 1000)
    for command in ("train", "plan", "simulate", "fit"):
        code, error = said(capsys, command, f"{stranger}/run.toml")
        assert (code, where in error) == (2, True), error
        assert f"'{NAME}' would run code that a file names" in error
        assert "add --trust to the command" in error
        assert not (stranger / "imported").exists()


def test_a_machine_imports_no_code(stranger: Path) -> None:
    tier = Tier(**{**vars(small_machine().tiers[0]), "kind": NAME})
    with granting(NOTHING):
        for read in (lambda: open_tier(tier, 4096, stranger, Arena), lambda: device_of(NAME)):
            with pytest.raises(ConfigError, match="would run code that a file names"):
                read()
    assert not (stranger / "imported").exists()


@pytest.mark.parametrize(
    "changes", [{"optimizer": NAME}, {"optimizer": "torch", "optimizer_settings": {"optimizer": NAME}}]
)
def test_a_plan_imports_no_code(stranger: Path, changes: dict[str, object]) -> None:
    with granting(NOTHING), pytest.raises(ConfigError, match="would run code that a file names"):
        planned_optimizer(some_plan(**changes))
    assert not (stranger / "imported").exists()


GRANTS = [("--trust",), (f"model.name={NAME}",), (f"model.name='{NAME}'",), (f'model={{ name = "{NAME}" }}',)]


@pytest.mark.parametrize("grant", GRANTS)
def test_trust_and_the_command_line_itself_grant_code(
    stranger: Path, capsys: pytest.CaptureFixture[str], grant: tuple[str, ...]
) -> None:
    sizes = "{ dim = 64, num_layers = 1, num_heads = 2, dropout = 0.1 }"
    changed(stranger, f'name = "gpt", sizes = {sizes}', f'name = "{NAME}"')
    code, error = said(capsys, "plan", f"{stranger}/run.toml", *grant)
    assert code == 2  # it was called, and makes no module
    assert "expected a torch.nn.Module, got NoneType" in error
    assert (stranger / "imported").exists()


PATHS = [
    ("out", 'out = "{root}/out"', 'out = "{other}/out"'),
    ("machine", 'machine = "{root}/machine.toml"', 'machine = "{other}/machine.toml"'),
    ("machine", 'machine = "{root}/machine.toml"', 'machine = "{root}/../other/machine.toml"'),
    ("data.source", 'source = "{root}/text"', 'source = "{other}"'),
    ("data.source", 'source = "{root}/text"', 'source = "{other}/*.txt"'),
    ("memory.folder", 'memory = {{', 'memory = {{ folder = "{other}/swap",'),
    ("data.tokenizer", 'data = {{', 'data = {{ tokenizer = "{other}/tokenizer.json",'),
    ("model.name", 'name = "gpt", sizes', 'name = "{other}/config.json", sizes'),
]  # fmt: skip


@pytest.mark.parametrize(("where", "old", "new"), PATHS)
def test_a_run_leads_nowhere(
    stranger: Path, capsys: pytest.CaptureFixture[str], where: str, old: str, new: str
) -> None:
    other = stranger.parent / "other"
    other.mkdir()
    save_machine(small_machine(), other / "machine.toml")
    (stranger / "text").mkdir()
    (stranger / "text" / "a.txt").write_text("text\n" * 1000)
    (other / "secret.txt").write_text("secret\n")
    changed(stranger, old.format(root=stranger), new.format(root=stranger, other=other))
    before = sorted(other.rglob("*"))
    code, error = said(capsys, "train", f"{stranger}/run.toml")
    assert code == 2
    assert f"{where}: " in error, error
    assert "is outside of the working directory and of the folder of the file that names it" in error
    assert sorted(other.rglob("*")) == before


def granted(*argv: str) -> Callable[..., None]:
    """Calls a check under what a command line grants, and nothing that was granted beforehand."""

    def call(check: Callable[..., None], *args: object) -> None:
        with granting(permissions_of(parse(argv))):
            check(*args)

    return lambda check, *args: Context().run(call, check, *args)


def test_a_link_in_its_folder_leads_nowhere_either(stranger: Path) -> None:
    (stranger / "text").symlink_to(stranger.parent)
    under = granted("train", f"{stranger}/run.toml")
    under(check_path, stranger / "more", "data.source")
    with pytest.raises(ConfigError, match=r"data.source: .* is outside"):
        under(check_path, stranger / "text", "data.source")


def test_what_the_command_line_grants(stranger: Path, tmp_path: Path) -> None:
    run, other = f"{stranger}/run.toml", tmp_path / "other"
    words = ["train", run, f"data.source={other}/text", "model.name=some.module:make", "machine='h100'"]
    under, trusting = granted(*words), granted(*words, "--trust")
    for path in (stranger / "a" / "b", other / "text" / "c.txt", Path("here"), Path.cwd() / "there"):
        under(check_path, path, "x")
    under(check_code, "some.module:make", "x")
    for path in (other, other / "text2", stranger.parent, Path("..")):
        with pytest.raises(ConfigError, match=r"^x: "):
            under(check_path, path, "x")
    with pytest.raises(ConfigError, match=r"^x: 'some.module:other' would run code"):
        under(check_code, "some.module:other", "x")
    for call in (trusting, lambda check, *args: Context().run(check, *args)):  # from Python nothing is asked
        call(check_path, other, "x")
        call(check_code, "some.module:other", "x")


def test_a_placement_leads_nowhere(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stranger.parent / "two.toml"
    other.write_text("secret = 1\n")
    placed_plan(machine=str(other)).save(stranger / "plan.json")
    code, error = said(capsys, "place", "--plan", f"{stranger}/plan.json")
    assert code == 2
    assert "request.machine: " in error
    assert "is outside of the working directory" in error
    assert "secret" not in error


def test_a_list_of_devices_leads_nowhere(stranger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = stranger.parent / "other.toml"
    other.write_text(machine_to_toml(small_machine()))
    devices = [
        f'[[devices]]\nname = "{name}"\nmachine = "{path}"' for name, path in (("a", other), ("b", "../other.toml"))
    ]
    for device in devices:
        (stranger / "two.toml").write_text(f'name = "two"\ndate = "2026"\nsource = "x"\n{device}\n')
        code, error = said(capsys, "place", "--model", "gpt2", "--machine", f"{stranger}/two.toml")
        assert code == 2
        assert "machine of device" in error
        assert "is outside" in error

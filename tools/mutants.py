"""Put plausible faults into copies of the code, one at a time, and see whether the tests of that part notice.

    python -m tools.mutants [PART ...] [--jobs N] [--only WORD] [--new] [--lived] [--minutes N] [--report FILE]

``tools/faults/PART.toml`` has the faults of a part, each as a text of a file that occurs there exactly once and what
stands in its place. A fault is put into a copy of the tree in a temporary folder; the working tree is never written
to. Files of tests run one after another until one notices it: those that the fault names (or single tests of files,
``FILE::TEST``), those that its part names as near to its file, then all others of its part. Each has passed without a
fault before it counts. Tests that take five times as long as without a fault, and half a minute more, hang, which
counts as noticed.

Results are kept in out/mutants, a file a fault, so that parts may be run one after another.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
#: Folders and files that tests need; everything else of the tree stays where it is.
_COPIED = ("src", "tests", "tools", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md")
#: What is imported once, before processes are forked that run tests; nothing of the tree itself.
_PRELOADED = ("pytest", "numpy", "torch", "torch.distributed", "torch._dynamo", "highspy", "safetensors")
#: Marks of tests that may be run: all that `make check` runs.
_TESTS = "not gpu and not multi_gpu and not slow"
#: Packages of the tree, which each process imports from its own copy.
_PACKAGES = ("lading", "tests", "tools", "benchmarks")
#: A hang: so many times the seconds without a fault, and so many more.
_TIMES, _MORE_S = 5.0, 30.0
#: Statuses of a process that tests ended with: none failed, some did, collecting them failed.
_PASSED, _FAILED, _NOT_COLLECTED = 0, 1, 2
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl


class FaultError(Exception):
    """Raised where a fault cannot be put into the code, or tests fail without one; says what to change."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Plausible slip of a colleague.

    Attributes:
        file: Path within the tree.
        old: Text that occurs in the file exactly once.
        new: Text in its place.
        hurts: Who would be hurt, and how.
        tests: Files of tests, or single tests, in the order in which they run.
        same: Why it changes nothing; "" where it does.
        since: Test that was written as this fault was not noticed, which runs first; "" where it was from the
            beginning.
    """

    part: str
    name: str
    file: str
    old: str
    new: str
    hurts: str
    tests: tuple[str, ...]
    same: str = ""
    since: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of the tests on one fault, or of a file of tests without one.

    Attributes:
        ended: "lived" if all tests passed; else "failed", "hung" or "crashed".
        by: Test that noticed it.
        seconds: Seconds of all tests that ran.
    """

    ended: str
    by: str
    seconds: float
    commit: str = ""


def read_faults(folder: Path) -> list[Fault]:
    """Read the faults of all parts.

    Raises:
        FaultError: an entry lacks a key or has an unknown one, or two have one name.
    """
    faults: list[Fault] = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        for entry in table["fault"]:
            near = table.get("near", {}).get(entry.get("file"), ())
            first = (entry["since"],) if entry.get("since") else ()
            tests = tuple(dict.fromkeys((*first, *entry.pop("tests", ()), *near, *table["tests"])))
            try:
                faults.append(Fault(part=path.stem, tests=tests, **entry))
            except TypeError as error:
                raise FaultError(f"{path}, {entry.get('name', entry)}: {error}") from error
    names = [(fault.part, fault.name) for fault in faults]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FaultError(f"expected a name of its own for each fault of a part, got {twice[0]} twice")
    return faults


def mutated(root: Path, fault: Fault) -> str:
    """Text of a fault's file with the fault in it.

    Raises:
        FaultError: the file is not there, the old text does not occur exactly once, or the new one is no Python.
    """
    path = root / fault.file
    where = f"{fault.part}/{fault.name}: {fault.file}"
    if not path.is_file():
        raise FaultError(f"{where}: expected a file, found none; write where the code is now")
    text = path.read_text()
    if (count := text.count(fault.old)) != 1 or fault.old == fault.new:
        raise FaultError(f"{where}: expected the old text once, found it {count} times; write it as the code is now")
    changed = text.replace(fault.old, fault.new)
    try:
        compile(changed, fault.file, "exec")
    except SyntaxError as error:
        raise FaultError(f"{where}: expected Python with the fault in it, got {error}") from error
    return changed


class _Copy:
    """Copy of the tree, in which files are changed and tests run."""

    def __init__(self, root: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="lading-mutants-"))
        for name in _COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, self.path / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, self.path / name)
        self._written = 0

    def write(self, file: str, text: str) -> None:
        """Write a file, as old as no other version of it was, as Python takes compiled code by age and size."""
        self._written += 1
        (self.path / file).write_text(text)
        age_s = 1_000_000_000 + self._written
        os.utime(self.path / file, (age_s, age_s))

    def run(self, test: str, limit_s: float) -> Outcome:
        """Run a file of tests up to its first failure, in a process of its own."""
        noticed, start = self.path / "noticed.txt", time.monotonic()
        noticed.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_tests(self.path, test, noticed)
        status = None
        while status is None and time.monotonic() - start < limit_s:
            done, found = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if done else None
            time.sleep(0.02)
        _end_children()
        ended = {None: "hung", _PASSED: "lived", _FAILED: "failed", _NOT_COLLECTED: "failed"}.get(status, "crashed")
        by = noticed.read_text() if noticed.exists() else "" if ended == "lived" else test
        return Outcome(ended=ended, by=by, seconds=time.monotonic() - start)


def _be_tests(copy: Path, test: str, noticed: Path) -> NoReturn:
    """Turn a forked process into one that runs tests on a copy of the tree."""
    status = 99
    try:
        os.setsid()
        log = os.open(copy / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(log, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]:
            del sys.modules[name]
        main = sys.modules["__main__"]  # which processes that tests start would import
        main.__spec__ = None
        main.__dict__.pop("__file__", None)
        paths = [str(copy / "src"), str(copy)]
        sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "src")))]
        sys.argv = ["pytest"]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        status = _tested(copy, test, noticed)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _tested(copy: Path, test: str, noticed: Path) -> int:
    import pytest

    class FirstFailure:
        def pytest_runtest_logreport(self, report: Any) -> None:
            self.pytest_collectreport(report)

        def pytest_collectreport(self, report: Any) -> None:
            if report.failed and not noticed.exists():
                noticed.write_text(report.nodeid)

    temporary = f"--basetemp={copy / 'temporary'}"
    status = pytest.main(
        ["-x", "-q", "-p", "no:cacheprovider", "-m", _TESTS, temporary, test], plugins=[FirstFailure()]
    )
    package = sys.modules.get("lading")
    assert package is None or str(package.__file__).startswith(str(copy)), f"tests ran on {package.__file__}"
    return int(status)


def _end_children() -> None:
    """Kill whatever tests have left behind: processes without a parent become children of this one."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for child in map(int, children):
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


class _Runner:
    """Runs of a job: seconds of each file of tests without a fault, and results, kept in a folder."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.out = root, out
        self.commit = _git(root, "log", "-1", "--format=%h", "--", "src")
        changed = "+" if _git(root, "status", "--porcelain", "src", "tests") else ""
        self._tested = _git(root, "log", "-1", "--format=%h", "--", "src", "tests") + changed

    def baseline(self, test: str) -> Path:
        """File with the outcome of a file of tests without a fault, of these sources and tests."""
        return self.out / "tests" / self._tested / f"{test.replace('/', '.')}.json"

    def result(self, fault: Fault) -> Path:
        """File with the outcome of a fault."""
        return self.out / fault.part / f"{fault.name}.json"

    def time_tests(self, copy: _Copy, test: str) -> None:
        """Run a file of tests without a fault, and keep its seconds.

        Raises:
            FaultError: it does not pass.
        """
        outcome = copy.run(test, 600.0)
        if outcome.ended != "lived":
            log = (copy.path / "log.txt").read_text()[-3000:]
            raise FaultError(f"{test} without a fault: expected it to pass, it {outcome.ended}: {outcome.by}\n{log}")
        _write(self.baseline(test), outcome)

    def try_fault(self, copy: _Copy, fault: Fault) -> None:
        """Run the tests of a fault until one fails, and keep and print the outcome."""
        original = (self.root / fault.file).read_text()
        outcome, start = Outcome(ended="lived", by="", seconds=0.0), time.monotonic()
        copy.write(fault.file, mutated(self.root, fault))
        try:
            for test in fault.tests:
                if not self.baseline(test).exists():
                    copy.write(fault.file, original)
                    self.time_tests(copy, test)
                    copy.write(fault.file, mutated(self.root, fault))
                outcome = copy.run(test, _MORE_S + _TIMES * _read(self.baseline(test)).seconds)
                if outcome.ended != "lived":
                    break
        finally:
            copy.write(fault.file, original)
        seconds = time.monotonic() - start
        _write(self.result(fault), Outcome(ended=outcome.ended, by=outcome.by, seconds=seconds, commit=self.commit))
        print(f"{outcome.ended:8}{seconds:6.1f} s  {fault.part}/{fault.name}  {outcome.by}", flush=True)


def _leave_undecided(runner: _Runner, faults: Sequence[Fault], pid: int) -> None:
    for fault in faults if os.getpid() == pid else ():
        if (path := runner.result(fault)).exists() and _read(path).ended == "lived":
            _write(path, replace(_read(path), ended="undecided"))


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _write(path: Path, outcome: Outcome) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(outcome)))


def _read(path: Path) -> Outcome:
    return Outcome(**json.loads(path.read_text()))


def _share(root: Path, jobs: int, each: Callable[[_Copy, T], None], work: Sequence[T], until_s: float) -> bool:
    """Do all work in so many processes, each with a copy of the tree; returns whether all of it was done.

    Args:
        until_s: Moment of the monotonic clock from which on nothing more is begun.
    """
    pids: list[int] = []
    for job in range(min(jobs, len(work))):
        if pid := os.fork():
            pids.append(pid)
            continue
        status, copy = 1, None
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
            copy = _Copy(root)
            for item in work[job::jobs]:
                if time.monotonic() > until_s:
                    break
                each(copy, item)
            else:
                status = 0
        except FaultError as error:
            print(error, file=sys.stderr, flush=True)
        except Exception:
            traceback.print_exc()
        finally:
            _end_children()
            if copy is not None:
                shutil.rmtree(copy.path, ignore_errors=True)
            os._exit(status)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return not any(statuses)


def run(
    faults: Sequence[Fault], root: Path, out: Path, jobs: int, preloaded: Iterable[str] = _PRELOADED,
    until_s: float = float("inf"),
) -> int:  # fmt: skip
    """Try faults; returns how many lived that change something.

    Args:
        out: Folder of results.
        preloaded: Modules that are imported once, before processes are forked.
        until_s: Moment of the monotonic clock from which on nothing more is begun.
    Raises:
        FaultError: one cannot be put into the code, tests fail without any, or not all of them were tried.
    """
    for fault in faults:
        mutated(root, fault)
        if missing := [test for test in fault.tests if not (root / test.partition("::")[0]).is_file()]:
            raise FaultError(f"{fault.part}/{fault.name}: expected tests that are there, found no {missing[0]}")
    for name in preloaded:
        importlib.import_module(name)
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3  # a fault may ask for any memory
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    runner = _Runner(root, out)
    if not _share(root, jobs, runner.try_fault, faults, until_s):
        raise FaultError("not all faults were tried; see above, and run it again with --new")
    return sum(_read(runner.result(fault)).ended == "lived" and not fault.same for fault in faults)


def report(faults: Sequence[Fault], out: Path) -> str:
    """Write the page on the last results of all faults."""
    runner = _Runner(ROOT, out)
    known = {fault: _read(path) for fault in faults if (path := runner.result(fault)).exists()}
    results = {fault: result for fault, result in known.items() if result.ended != "undecided"}
    changing = [fault for fault in results if not fault.same]
    tried = sum(not fault.same for fault in known)
    noticed = [fault for fault in changing if results[fault].ended != "lived"]
    first = len(noticed) - sum(bool(fault.since) for fault in noticed)
    commits = ", ".join(sorted({result.commit for result in results.values()}))
    lines = [
        "# Faults put into the code on purpose", "",
        f"`make mutants` puts {len(faults)} plausible faults into copies of the code, one at a time "
        "(`tools/faults/*.toml`), and runs the default tests of that part until one fails. Written by "
        f"`python -m tools.mutants --report docs/mutants.md`, {time.strftime('%Y-%m-%d', time.gmtime())}; last runs on "
        f"the sources of commits {commits}.", "",
        f"**Tests notice {len(noticed)} of {tried} faults that were tried and change something "
        f"({len(noticed) / max(1, tried):.1%}); {first} of them before a test was written for it.** Of the others "
        f"{len(changing) - len(noticed)} live, and {tried - len(changing)} lived on the nearest tests and were "
        f"not tried on all of their part (undecided). {len(faults) - len(known)} were not tried yet.", "",
        "| part | faults | not tried yet | undecided | change nothing | noticed | of them by a hang or crash | live |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for part in sorted({fault.part for fault in faults}):
        mine = [fault for fault in faults if fault.part == part]
        real = [fault for fault in mine if fault in changing]
        seen = [fault for fault in real if fault in noticed]
        hard = sum(results[fault].ended in ("hung", "crashed") for fault in seen)
        untried, same = sum(fault not in known for fault in mine), sum(bool(fault.same) for fault in mine)
        near = sum(fault in known and fault not in results for fault in mine)
        row = (part, len(mine), untried, near, same, len(seen), hard, len(real) - len(seen))
        lines.append(f"| {' | '.join(map(str, row))} |")
    lines += _listed("## Faults that live", [f for f in changing if f not in noticed], lambda f: f.hurts)
    lines += _listed("## Faults that no test noticed at first", [f for f in noticed if f.since], lambda f: f.since)
    lines += _listed("## Faults that change nothing", [f for f in faults if f.same], lambda f: f.same)
    return "\n".join(lines) + "\n"


def _listed(title: str, faults: Sequence[Fault], why: Callable[[Fault], str]) -> list[str]:
    rows = [f"- {fault.part}, `{fault.name}` ({fault.file.removeprefix('src/lading/')}): {why(fault)}"
            for fault in faults]  # fmt: skip
    return ["", title, "", *rows] if rows else []


def main() -> None:
    """Run what the command line asks for; ends with status 1 where a fault lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="parts to try (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that run tests at a time")
    parser.add_argument("--only", default="", help="faults with this word in their name")
    parser.add_argument("--lived", action="store_true", help="faults without a result, or that lived the last time")
    parser.add_argument("--new", action="store_true", help="faults without a result")
    parser.add_argument("--most", type=int, default=None, help="files of tests that are run of each fault at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing more after so long")
    parser.add_argument("--check", action="store_true", help="see whether every fault can be put into the code")
    parser.add_argument("--report", type=Path, help="write the page on the last results to this file, and run nothing")
    parser.add_argument("--faults", type=Path, default=ROOT / "tools" / "faults")
    parser.add_argument("--root", type=Path, default=ROOT, help="tree that is copied")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants", help="folder of results")
    parser.add_argument("--bare", action="store_true", help="import nothing beforehand")
    asked = parser.parse_args()
    try:
        faults = read_faults(asked.faults)
        if unknown := set(asked.parts) - {fault.part for fault in faults}:
            raise FaultError(f"expected parts among {sorted({f.part for f in faults})}, got {sorted(unknown)}")
        if asked.report is not None:
            asked.report.write_text(report(faults, asked.out))
            return
        chosen = [replace(f, tests=f.tests[: asked.most]) for f in faults if f.part in (asked.parts or [f.part])]
        chosen = [f for f in chosen if asked.only in f.name]
        if asked.lived or asked.new:
            runner = _Runner(asked.root, asked.out)
            again = ("lived", "undecided") if asked.lived else ("undecided",)
            chosen = [f for f in chosen if not (at := runner.result(f)).exists() or _read(at).ended in again]
        if asked.check:
            for fault in chosen:
                mutated(asked.root, fault)
            return
        until_s = time.monotonic() + 60 * asked.minutes
        if asked.most is not None:  # what lives then may be noticed by tests that were not run
            atexit.register(_leave_undecided, _Runner(asked.root, asked.out), chosen, os.getpid())
        lived = run(chosen, asked.root, asked.out, asked.jobs, () if asked.bare else _PRELOADED, until_s)
    except FaultError as error:
        sys.exit(f"mutants: {error}")
    print(f"{len(chosen)} faults tried, {lived} of them live")
    sys.exit(lived > 0)


if __name__ == "__main__":
    main()

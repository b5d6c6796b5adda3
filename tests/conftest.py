"""Settings of every test: the same examples in every run, however slow the machine; long files first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from lading.permissions import Permissions, granting
from tests.runs import YOUNG_OBJECTS, shorten_search

settings.register_profile("lading", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("lading")

# Tests make many small objects, of which few are garbage: it is looked for less often, as in what they start.
gc.set_threshold(YOUNG_OBJECTS)

# Where bytecode is not written, pytest rewrites each file of tests in every run, and processes compile the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A background shell ignores Ctrl-C for the tests and all they start; the tests of Ctrl-C need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # one core each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:  # Plans are kept for the tests of all processes, not in the user's cache.
    _CACHE = tempfile.TemporaryDirectory(prefix="lading-cache-")
    os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Runs and ranks that tests start are forked from one process, which has imported what they need.
multiprocessing.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "tyro", "highspy", "pytest"),
        *("lading.cli.train_command", "lading.train", "lading.matrices", "lading.models.reference"),
    ]
)


@pytest.fixture(scope="session", autouse=True)
def _folders_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of one test may name those of another, as where a run of one folder goes on in a second."""
    with granting(Permissions(folders=(tmp_path_factory.getbasetemp().resolve(),))):
        yield


@pytest.fixture(scope="module", autouse=True)
def short_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plans of small steps are the first that takes at most twice the least time; their search takes longest by far.

    They keep what every plan keeps. How good a plan is, tests/planner and tests/golden check with the whole search, and
    the slow tests search as for users, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not any("slow" in item.keywords for item in request.session.items):
            shorten_search(patch.setattr)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As many compute threads as ranks have, to be compared with them to the bit, whatever a test before has set."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences are compared whole; tests of how lines are broken set their own width."""
    monkeypatch.setenv("COLUMNS", "500")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs come first: where several processes share the work, the last files should be short ones.

    Of a test marked long that has several cases the first is not: it runs by default.
    """
    items.sort(key=lambda item: len(item.path.parts))
    began = set[str]()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if case and name not in began:
            began.add(name)
            item.own_markers = [mark for mark in item.own_markers if mark.name != "long"]


_FROZEN: set[object] = set()


@pytest.fixture(autouse=True)
def _little_to_look_through(request: pytest.FixtureRequest) -> None:
    """What was imported and captured is left out of every later look for garbage, as each Trainer collects it.

    Looked at where a file begins, and where much was imported since: torch's fake tensors import 800 modules.
    """
    here = (request.path, len(sys.modules) // 200)
    if here not in _FROZEN:
        _FROZEN.add(here)
        if len(gc.get_objects()) > 50_000:
            gc.collect()
            gc.freeze()

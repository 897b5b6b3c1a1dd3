"""Shared fixtures: checkpoints made once a session, one thread, small engines."""

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Read when torch is imported, here and in the processes that tests start: threads that wait for a
# core that another test keeps busy would take most of the processors' time.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Processes that tests start would compile every module anew, which takes longer than most of them run.
    sys.dont_write_bytecode = False
if not torch.cuda.is_available():
    # Read by triton when it is first imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from spd.formats.hub import spd_cache_folder
from spd.kernels.native.build import DTYPE_FLAGS, NativeUnavailable
from spd.kernels.native.library import open_library
from spd.runtime.round.arithmetic_probe import WIDEST_BUCKET
from spd.runtime.round.model_runner import ModelRunner
from tests.helpers import Patch, Tiny, TinyShelf
from tests.interpreted_dot import install
from tests.known_trials import FEW_ROW_COUNTS, probe_once, set_probed_row_counts
from tests.lanes import choose
from tests.pairs import Pairs
from tests.recipes.medium import write_medium, write_medium_draft

if os.environ.get("TRITON_INTERPRET") == "1":
    install()


@pytest.fixture(autouse=True, scope="module")
def _old_objects_are_no_garbage() -> None:
    """Leave what is there before a module's tests to no later collection.

    An engine collects garbage when it closes. That visits every object of a test process, torch's
    and all collected tests among them, and took most of the time of the tests with small engines.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread: tiny models gain nothing from more, and busy machines lose much."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _tried_once(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    """Try a model's arithmetic once a process; `every_trial` tries it in every engine."""
    if "every_trial" not in request.fixturenames:
        monkeypatch.setattr(ModelRunner, "_probe_row_counts", probe_once)
        set_probed_row_counts(monkeypatch, FEW_ROW_COUNTS)


@pytest.fixture
def every_trial() -> None:
    """Let every engine try its arithmetic itself."""


@pytest.fixture
def untried(monkeypatch: Patch) -> None:
    """Let no engine try its arithmetic: all run full tiles, as other programs' numbers need."""
    whole_tiles = lambda runner, alone: setattr(runner, "buckets", (WIDEST_BUCKET,))  # noqa: E731
    monkeypatch.setattr(ModelRunner, "_probe_row_counts", whole_tiles)


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """Restore the number of threads of the process, which an engine sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_are_heard() -> None:
    """Restore SIGINT, which background jobs of a shell ignore, and their children with them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the C kernels before the workers start, each of which would compile them."""
    if not session.config.getoption("numprocesses", None):
        return
    for dtype in DTYPE_FLAGS:
        with suppress(NativeUnavailable):
            open_library(spd_cache_folder, dtype)


def pytest_sessionfinish() -> None:
    """Let garbage be collected again: what is frozen at the exit is reported as a leak."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases before `-m` selects."""
    choose(items)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "so many of each slow matrix, drawn the same way every time; 0 is all of them"
    parser.addoption("--combinations", type=int, default=20, metavar="N", help=words)


@pytest.fixture
def say(request: pytest.FixtureRequest, record_property: Callable) -> Callable[[str], None]:
    """Print a line of a passing test: at once, or from a worker process after all tests."""
    if hasattr(request.config, "workerinput"):
        return lambda line: record_property("said", line)
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def print_line(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{line}", end="", flush=True)

    return print_line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in itertools.chain(*terminalreporter.stats.values()):
        if getattr(report, "when", "") == "call":
            for line in (value for name, value in report.user_properties if name == "said"):
                terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the 0.35 B checkpoint: made here, or the existing copy in SPD_TEST_MEDIUM."""
    if os.environ.get("SPD_TEST_MEDIUM"):
        return Path(os.environ["SPD_TEST_MEDIUM"])
    folder = tmp_path_factory.mktemp("medium")
    write_medium(folder)
    write_medium_draft(folder / "draft", folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Return tiny random checkpoints by variant name and options, written once a session."""
    return TinyShelf(tmp_path_factory.mktemp("tiny")).get


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Return tiny targets and their drafters by name, written once a session."""
    return Pairs(tmp_path_factory.mktemp("pairs"))

"""Ranks that die, fail, hang or are stopped: the run ends, says which, and leaves nothing."""

import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.errors import EngineError
from spd.runtime import EngineConfig, Request, SamplingParams, make_plan
from spd.runtime.ranks import leader
from spd.runtime.ranks.communicator import describe_rank
from spd.runtime.ranks.follower import LOOPBACK, connect_to_leader
from spd.runtime.ranks.leader import Leader
from tests.helpers import Patch, Tiny, make_engine, random_prompts
from tests.parallel import process_ranks
from tests.parallel.process_ranks import (
    ENDS_WITHIN,
    assert_nothing_is_left,
    children,
    has_ended,
    process_ids_of,
    wait_until,
)

STARTS_WITHIN = (
    240  # Seconds in which a fault has to happen, on a machine that does other things too.
)
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
SPD = [
    "generate",
    "-m",
    "demo",
    "--tp",
    "2",
    "--raw",
    "--set=ignore_eos=on",
    "--threads",
    "1",
    "-n",
    "4000",
]
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        for line in file:"
# HELD: no thread can act.
KILLED = "os.kill(os.getpid(), 9)"
HELD = "ctypes.PyDLL(None).sleep(600)"
ASLEEP = "time.sleep(600)"
STOPPED = "os.kill(os.getpid(), 19)"
RAISES = "raise ValueError('no such page')"
WAITING = "has kept the others waiting"
SILENT = "has not answered for"
PLACES = {
    "loading": ("spd.runtime.models.attention", "LatentAttention.__call__", 1),  # a probe's
    "prefill": ("spd.runtime.round.local_queue", "LocalRoundQueue.flush", 1),
    "decoding": ("spd.runtime.round.local_queue", "LocalRoundQueue.launch", 4),
}
FAULT = """
import ctypes, importlib, os, time
def plant(place, name, calls):
    owner, name = name.split(".")
    owner = getattr(importlib.import_module(place), owner)
    honest = getattr(owner, name)
    def harmed(*args):
        harmed.calls += 1
        if harmed.calls == calls:
            open({mark!r}, "w").close()
            {act}
        return honest(*args)
    harmed.calls = 0
    setattr(owner, name, harmed)
plant(*{place!r})
"""
STARTED = """
import sys
from spd.runtime.ranks import leader
fault = {fault!r}
if {rank} == 0:
    exec(fault)
else:
    leader.RANK_PROGRAM = leader.RANK_PROGRAM.replace("from spd.cli.rank", fault + "\\nfrom spd.cli.rank")
from spd.cli.app import main
sys.exit(main({argv!r}))
"""
LOST = """
import sys, threading, time, tty
from spd.cli.signals import exit_on_engine_error
from spd.errors import EngineError
def fail():
    raise EngineError("rank 3: has not answered")
exit_on_engine_error(lambda error: print(error.message, flush=True))
tty.setraw(0)
threading.Thread(target=fail).start()
time.sleep(60)
"""


def run_until_harmed(rank: int, place: str, act: str, folder: Path) -> tuple[int, str, list[int]]:
    """Run `spd` with a fault in one rank; return its status, output, and started processes."""
    mark = folder / "harmed"
    output = folder / "said"
    fault = FAULT.format(place=PLACES[place], act=act, mark=str(mark))
    command = [sys.executable, "-c", STARTED.format(rank=rank, fault=fault, argv=[*SPD, PROMPT])]
    with output.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        assert wait_until(mark.exists, STARTS_WITHIN)
        started = children(process.pid)
        shared = process_ranks.shared_memory([process.pid, *started])
        ended = wait_until(
            lambda: process.poll() is not None and all(map(has_ended, started)), ENDS_WITHIN
        )
        assert ended, output.read_text()
    finally:
        process.kill()
    assert not any(map(Path.exists, shared))
    return process.returncode, output.read_text(), started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "act", "places", "expected"),
    [
        (1, KILLED, PLACES, "was ended by SIGKILL"),
        (1, RAISES, PLACES, "ValueError: no such page"),
        (1, ASLEEP, PLACES, WAITING),
        (0, ASLEEP, PLACES, WAITING),
        (0, STOPPED, PLACES, SILENT),
        (1, STOPPED, ["decoding"], SILENT),
        (1, HELD, ["decoding"], SILENT),
        (0, HELD, ["loading", "decoding"], SILENT),
    ],
    ids=[
        "killed",
        "raises",
        "sleeps",
        "rank 0 sleeps",
        "rank 0 stopped",
        "stopped",
        "held",
        "rank 0 held",
    ],
)
def test_a_rank_is_named(
    rank: int, act: str, places: list[str], expected: str, tmp_path: Path
) -> None:
    for place in places:
        folder = tmp_path / place
        folder.mkdir()
        status, message, started = run_until_harmed(rank, place, act, folder)
        # A rank 0 that is silent is ended by another rank, which says so.
        ended = -signal.SIGKILL if rank == 0 and expected == SILENT else EngineError.exit_code
        assert status == ended, message
        assert (
            f"error: rank {rank}: {expected}" in message
            and "Traceback" not in message.splitlines()[0]
        ), place
        assert message.count("error:") == 1, message
        assert started, place


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_killed_parent_takes_its_ranks_along(place: str, tmp_path: Path) -> None:
    status, output, started = run_until_harmed(0, place, "time.sleep(1); " + KILLED, tmp_path)
    assert (status, output) == (-signal.SIGKILL, "")
    assert started


def test_a_lost_rank_ends_the_run(tiny: Tiny) -> None:
    """Requests after the end are refused, and at once."""
    engine = make_engine(tiny("qwen3", max_positions=4096), tp=2, ctx=4096)
    with assert_nothing_is_left(engine):
        engine.add(Request("a", random_prompts(1, 300, 256)[0], LONG))
        for _ in range(4):
            engine.step()
        began = time.monotonic()
        os.kill(process_ids_of(engine)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1: was ended by SIGKILL") as caught:
            while time.monotonic() < began + 2 * ENDS_WITHIN:
                engine.step()
        assert caught.value.exit_code == 9 and time.monotonic() - began < ENDS_WITHIN
        began = time.monotonic()
        with pytest.raises(EngineError):
            engine.add(Request("b", (1, 2, 3), SamplingParams(max_tokens=4)))
            engine.step()
        assert time.monotonic() - began < 5
        engine.abort("a")
        engine.close()


def test_a_main_thread_that_hangs_is_ended_and_the_terminal_put_back() -> None:
    """Rank 0 hangs itself, or waits for a key."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (EngineError.exit_code, b"rank 3: has not answered\n")
    assert termios.tcgetattr(theirs) == before and b"?25h" in done.stderr
    os.close(ours)
    os.close(theirs)


def crowd(_: object, address: Mapping[str, Any]) -> None:
    """Let strangers come first to the port of rank 0, then rank 1 and one that knows no key."""

    def come() -> None:
        host = address["host"]
        port = address["port"]
        silent = []
        silent += [socket.create_connection((host, port)) for _ in range(40)]
        with suppress(AuthenticationError):
            connect_to_leader(host, port, b"another key")
        line, _ = connect_to_leader(host, port, bytes.fromhex(address["key"]))
        line.send_message(("hello", 1, describe_rank("cpu")))
        wait_until(lambda: line.closed, 1)
        while silent:  # each was asked for what it knows, and has heard nothing else
            with silent.pop() as stranger:
                assert stranger.recv(4096)
        line.close()

    threading.Thread(target=come, daemon=True).start()


def test_a_silent_connection_keeps_no_rank_waiting(tiny: Tiny, monkeypatch: Patch) -> None:
    """Strangers connect to a rank 0 that torchrun started: all must show a key."""
    with socket.create_server((LOOPBACK, 0)) as store:
        host, port = store.getsockname()
        monkeypatch.setattr(leader, "START_SECONDS", 20)
        monkeypatch.setattr(
            leader, "connect_torchrun_store", lambda: SimpleNamespace(host=host, port=port)
        )
        monkeypatch.setattr(leader, "announce_engine", crowd)
        met = Leader(make_plan(EngineConfig(model=tiny("qwen3"), tp=2, rendezvous=2)))
    met.close()
    assert list(met._connections) == [1]

"""Commands run side by side, for probes that compile or test much and measure nothing."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator, Iterator, Mapping, Sequence

from benchmarks.environment import ROOT
from benchmarks.gpu_suite.suite import environment

POLL_SECONDS = 0.1
"""Seconds between two looks."""


def run_together(
    commands: Mapping[str, Sequence[str]], max_running: int = 64
) -> Iterator[tuple[str, int]]:
    """Run commands, `max_running` at a time; yield each one's name and exit status as it ends.

    They are in this process's group, so that killing it kills them all. What still runs when the
    iterator is closed is killed, too.
    """
    return (ended for ended in watch_together(commands, max_running) if ended is not None)


def watch_together(
    commands: Mapping[str, Sequence[str]], max_running: int = 64
) -> Generator[tuple[str, int] | None, None, None]:
    """Run as `run_together` does, and yield None after every POLL_SECONDS, so that the caller can look at
    logs."""
    two_threads = {**environment(), "OMP_NUM_THREADS": "2"}
    waiting = list(commands.items())
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max_running:
                name, command = waiting.pop(0)
                running[name] = subprocess.Popen(
                    command,
                    env=two_threads,
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            for name in [name for name, child in running.items() if child.poll() is not None]:
                yield name, running.pop(name).returncode
            time.sleep(POLL_SECONDS)
            yield None
    finally:
        for child in running.values():
            child.kill()
            child.wait()

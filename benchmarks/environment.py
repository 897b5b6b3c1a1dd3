"""Conditions of a figure that a reader cannot see: the commit, and the load of other programs."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

from spd.runtime.lab.diagnostics import describe_machine

__all__ = ("ROOT", "ForeignLoad", "describe_commit", "describe_machine")
ROOT = Path(__file__).resolve().parents[1]


def describe_commit(*paths: str) -> dict[str, Any]:
    """Return the commit of the working tree and whether it, or what is at `paths`, was changed.

    None where git says nothing.
    """

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(
                ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return run.stdout.strip()

    status = git("status", "--porcelain", "--", *paths)
    return {"commit": git("rev-parse", "HEAD"), "changed": None if status is None else bool(status)}


def group_cpu_seconds(group: int) -> float:
    """Return the CPU seconds used so far by the living processes of one process group."""
    ticks = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended between the listing and the reading
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_cpu_seconds() -> float:
    """Return the seconds all CPUs of the machine were busy so far, time stolen by its host included."""
    user, nice, system, _idle, _wait, irq, soft_irq, steal = (
        int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + soft_irq + steal) / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """The CPUs that other programs used while a process group worked; above ~0.1 is noise."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.own_start = group_cpu_seconds(group)
        self.busy = busy_cpu_seconds()
        self.at = time.monotonic()

    def read(self) -> tuple[float, float]:
        """Return since its start: CPUs busy with others on average, and the group's CPU seconds."""
        own_seconds = group_cpu_seconds(self.group) - self.own_start
        busy = busy_cpu_seconds() - self.busy
        return max(0.0, busy - own_seconds) / max(1e-9, time.monotonic() - self.at), own_seconds

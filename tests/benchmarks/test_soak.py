"""The soak asks what it says, and sees an answer that is not what it should be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks import soak
from spd.cli.options import GenerateOptions
from tests.cli.serve.conftest import serving


def test_faults_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its requests over a socket, which this server does not have."""
    monkeypatch.setattr(soak, "SHARES", {"plain": 5, "aborted": 1, "malformed": 2, "canary": 1})
    monkeypatch.setattr(soak, "GROWTH", {"memory_mib": 1000, "descriptors": 100, "threads": 100})
    with serving(adaptive=False) as served:
        asked = soak.Soak(served.port, os.getpid(), tmp_path, GenerateOptions())
        asked.run(24, 4, 8)
        assert soak.faults_of(asked) == [] and len(asked.samples) == 4
        assert asked.counts.total() == 24 and set(asked.counts) == set(soak.SHARES)
        asked._canary_text = "another"
        monkeypatch.setattr(soak, "SHARES", {"canary": 1, "socket": 1})
        monkeypatch.setattr(soak, "GROWTH", {"memory_mib": -1000})
        asked.run(6, 2, 6)
    faults = " ".join(soak.faults_of(asked))
    for words in ("instead of 'another'", "no server is found", "memory_mib grew by"):
        assert words in faults

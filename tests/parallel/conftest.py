"""Ranks as threads, for tests of what they compute."""

from __future__ import annotations

import pytest

from spd.runtime.parallel import leader
from tests.parallel.thread_ranks import ThreadCrew


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of several ranks run them as threads of this process."""
    monkeypatch.setattr(leader, "Crew", ThreadCrew)

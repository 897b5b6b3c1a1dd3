"""Ranks as threads, for tests of what they compute."""

from datetime import timedelta

import pytest

from spd.runtime.ranks import communicator, leader
from spd.runtime.round.model_runner import ModelRunner
from tests.helpers import Patch
from tests.known_trials import probe_on_all_ranks
from tests.parallel.thread_ranks import ThreadLeader


@pytest.fixture
def threads(monkeypatch: Patch) -> None:
    """Run the ranks of engines as threads; a rank left alone by a failure gives up in minutes."""
    monkeypatch.setattr(leader, "Leader", ThreadLeader)
    monkeypatch.setattr(ModelRunner, "_probe_row_counts", probe_on_all_ranks)
    monkeypatch.setattr(communicator, "EXCHANGE_TIMEOUT", timedelta(minutes=5))

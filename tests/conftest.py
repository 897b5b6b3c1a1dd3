"""Shared fixtures: checkpoints made once a session, one thread, engines kept small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import TinyShelf


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tiny models gain nothing from more, and busy machines lose much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny random checkpoints by variant name and options, written once a session."""
    return TinyShelf(tmp_path_factory.mktemp("tiny")).get

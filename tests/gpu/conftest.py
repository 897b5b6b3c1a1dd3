"""Tests for a CUDA device: `pytest -m gpu tests/kernels tests/gpu`. Elsewhere all of them are
skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, and skip it where there is no device."""
    has_device = torch.cuda.is_available()
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Documents that are written by the program's own tables are what the tables say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.runtime.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]


def test_supported_models_is_current() -> None:
    """To write it anew: `python docs/supported_models.py > docs/supported-models.md`."""
    command = [sys.executable, "docs/supported_models.py"]
    run = subprocess.run(command, capture_output=True, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
    assert run.stdout == (ROOT / "docs" / "supported-models.md").read_bytes()


def test_what_is_read_is_what_can_be_built() -> None:
    assert set(SUPPORTED_ARCHITECTURES) == set(FAMILIES) | set(WRAPPERS)
    assert {text for _, text in WRAPPERS.values()} <= set(FAMILIES)
    page = (ROOT / "docs" / "supported-models.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in SUPPORTED_ARCHITECTURES)
    assert "docs/supported-models.md" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_tables_of_ranks_are_the_cost_models() -> None:
    """To write them anew: `python docs/parallel_tables.py`, whose tables stand under their names."""
    command = [sys.executable, "docs/parallel_tables.py"]
    run = subprocess.run(command, capture_output=True, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    tables = run.stdout.decode().strip().split("\n\n")
    assert len(tables) == 3 and all(f"{table}\n" in page for table in tables)


@pytest.mark.slow
def test_the_table_of_hybrids_is_the_plans() -> None:
    """To write it anew: `PYTHONPATH=. python docs/hybrid_tables.py`, for the one in hybrids.md."""
    command = [sys.executable, "docs/hybrid_tables.py"]
    run = subprocess.run(command, capture_output=True, cwd=ROOT, check=True, env={"PYTHONPATH": str(ROOT)})
    assert run.stdout.decode() in (ROOT / "docs" / "hybrids.md").read_text(encoding="utf-8")

"""The flags that docs/agents.md recommends fit the cards that it names, by the plan's own sums."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spd.cli.parser import parse_size
from spd.formats.folder import ModelFolder
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory import longest_context
from spd.runtime.plan.plan import outline
from tests.recipes.published_hybrids import RELEASES, write_published

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
ROWS = re.findall(r"\| (\d+) GB \| `spd serve Qwen/(\S+) ?(.*?)` \| ([\d,]+) \|", PAGE.read_text())


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_recommended_flags_fit(number: int, tmp_path: Path) -> None:
    """And leave no fifth of the context unused that the card could hold."""
    card, model, flags, shown = ROWS[number]
    values = dict(re.findall(r"--(\S+) (\S+)", flags))
    ctx = parse_size(values.pop("ctx"))
    assert ctx == int(shown.replace(",", "")) and values.keys() <= {"quantize", "concurrency"}
    folder = ModelFolder.named(str(write_published(tmp_path, RELEASES[model])))
    slots = int(values["concurrency"])
    config = EngineConfig(model=folder, quantize=values.get("quantize", "none"), slots=slots)
    plan = outline(config, Machine("cuda", int((int(card) - 0.5) * 2**30), (8, 9), foreseen=True))
    longest = longest_context(plan.shape, plan.memory_budget_bytes)
    assert plan.spec == "mtp" and ctx <= longest <= 1.2 * ctx


def test_every_card_is_there() -> None:
    assert {row[0] for row in ROWS} == {"24", "32", "48", "80"}

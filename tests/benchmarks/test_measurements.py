"""Acceptance, adaptive k and explain's predictions: each script in small, and its figures on made rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import acceptance, auto_k
from spd.runtime import Request, RoundRecord, SamplingParams
from spd.runtime.lab.load import Pass, Timeline


def record(request: str, number: int, position: int, accepted: int, k: int = 2, **ms: float) -> RoundRecord:
    times = {"draft": 1.0, "verify": 2.0, "rest": 0.5, "host": 0.5, **ms}
    draft = list(range(k))
    return RoundRecord(
        request, number, position, "ngram", draft, draft, accepted, [0] * (accepted + 1), times, k, k
    )


def test_rounds_without_room_and_first_rounds_are_left_out() -> None:
    params = SamplingParams(max_tokens=8)
    lines = [Timeline(request=Request(name, (1, 2, 3), params), arrived=0.0) for name in ("a", "b")]
    rounds = [
        record("a", 0, 3, 0),
        record("a", 1, 4, 2),
        record("b", 1, 4, 0),
        record("b", 2, 5, 1),
        record("a", 2, 7, 2),
        record("a", 3, 9, 0),  # 11 is the limit: 9 + 3 does not fit
        record("b", 3, 8, 1),
    ]
    counted = acceptance.counted_rounds(Pass(lines, rounds, 1.0), 2)
    assert [(r.request, r.round) for r in counted] == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("b", 3)]
    row = acceptance.row_of(counted)
    assert row["length"]["value"] == pytest.approx(1 + 6 / 5)
    assert row["rate"]["value"] == pytest.approx(0.6) and row["rounds"] == 5 and row["drafts"] == 10
    assert [share["value"] for share in row["per_position"]] == [0.8, 0.4]
    assert [share["value"] for share in row["conditional"]] == [0.8, 0.5]
    # Two requests: 4 of 4 and 2 of 6 drafts. Linearised by hand: 0.24.
    assert row["rate"]["error"] == pytest.approx((2 * (1.6**2 + 1.6**2)) ** 0.5 / 10)


def test_acceptance_of_a_self_draft_is_k_plus_one(tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    small = ["--each", "1", "--prompt-tokens", "40", "-n", "5", "--temperature", "0,1", "--slots", "5"]
    small += ["--draft-max", "1", "--out", str(out)]
    assert acceptance.main(["--only", "self", "--verify", "rejection", *small]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["verify"], row["temperature"]) for row in rows] == [("rejection", 1.0)]
    assert rows[0]["length"] == {"value": 2.0, "error": 0.0}


def test_the_best_fixed_k_is_the_fastest() -> None:
    def row(method: str, k: int, values: list[float], adaptive: bool = False) -> dict[str, Any]:
        found = {"method": method, "draft_max": k, "adaptive": adaptive, "concurrency": 4, "rounds": 10}
        return {**found, "tokens_per_second": {"values": values}, "drafted_per_position": [6, 3] if k else []}

    values = [float(number) for number in range(10, 17)]
    rows = [
        row("plain", 0, values),
        row("mtp", 1, [1.5 * value for value in values]),
        row("mtp", 2, [1.2 * value for value in values]),
        row("mtp", 2, [1.44 * value for value in values], adaptive=True),
    ]
    case = auto_k.case_of(rows)
    assert case["best_k"] == 1 and case["auto_over_best"]["median"] == pytest.approx(0.96)
    assert case["auto_over_plain"]["interval"] == pytest.approx((1.44, 1.44))
    assert case["rounds_with_drafts"] == 0.6

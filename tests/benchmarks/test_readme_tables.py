"""Tables of README and docs equal the result files; acceptance and adaptive k are counted right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import acceptance, auto_k, readme_tables
from benchmarks.readme_tables import BLOCK, PAGES, TABLES, with_tables
from spd.runtime import Request, RoundRecord, SamplingParams
from spd.runtime.lab.load import Pass, Timeline

MEASUREMENTS = PAGES[1]


def test_the_pages_are_current() -> None:
    """To write them anew: `python -m benchmarks.readme_tables --write`."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert {match[2] for text in texts for match in BLOCK.finditer(text)} == set(TABLES)
    assert [with_tables(text) for text in texts] == texts


def test_another_result_is_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = json.loads((readme_tables.RESULTS / "cpu_peers.json").read_text())
    result["entries"]["spd-plain"]["decode_tokens_per_second"]["median"] = 123.4
    result["entries"]["spd-ngram"] = result["entries"]["spd-plain"]
    del result["entries"]["vllm-draft"]
    (tmp_path / "cpu_peers.json").write_text(json.dumps(result))
    readme = with_tables(MEASUREMENTS.read_text(encoding="utf-8"), tmp_path)
    assert "| spd | 123.4 |" in readme and "| tokens/s, k = 4 | plain | draft | n-gram |" in readme
    assert (
        next(line for line in readme.splitlines() if line.startswith("| vLLM-CPU")).count("|  |")
        >= 1
    )
    monkeypatch.setattr(readme_tables, "PAGES", (tmp_path / "measurements.md",))
    (tmp_path / "measurements.md").write_text(readme)
    assert readme_tables.main([]) == 1, "made of other results"
    assert readme_tables.main(["--write"]) == 0 and readme_tables.main([]) == 0


def record(
    request: str, number: int, position: int, accepted: int, k: int = 2, **ms: float
) -> RoundRecord:
    times = {"draft": 1.0, "verify": 2.0, "rest": 0.5, "host": 0.5, **ms}
    draft = list(range(k))
    return RoundRecord(
        request=request,
        round=number,
        position=position,
        method="ngram",
        draft=draft,
        sampled=draft,
        accepted=accepted,
        committed=[0] * (accepted + 1),
        ms=times,
        draft_forwards=k,
        k=k,
    )


def test_rounds_without_room_and_first_rounds_are_left_out() -> None:
    params = SamplingParams(max_tokens=8)
    lines = [Timeline(request=Request(name, (1, 2, 3), params), arrived=0.0) for name in ("a", "b")]
    round_values = [("a", 0, 3, 0), ("a", 1, 4, 2), ("b", 1, 4, 0), ("b", 2, 5, 1), ("a", 2, 7, 2)]
    round_values += [("a", 3, 9, 0), ("b", 3, 8, 1)]  # 11 is the limit: 9 + 3 does not fit
    rounds = [
        record(name, number, position, accepted)
        for name, number, position, accepted in round_values
    ]
    counted = acceptance.full_rounds(Pass(lines, rounds, 1.0), 2)
    assert [(r.request, r.round) for r in counted] == [
        ("a", 1),
        ("a", 2),
        ("b", 1),
        ("b", 2),
        ("b", 3),
    ]
    row = acceptance.row_of(counted)
    assert row["length"]["value"] == pytest.approx(1 + 6 / 5)
    assert row["rate"]["value"] == pytest.approx(0.6) and row["rounds"] == 5 and row["drafts"] == 10
    assert [share["value"] for share in row["per_position"]] == [0.8, 0.4]
    assert [share["value"] for share in row["conditional"]] == [0.8, 0.5]
    # Two requests: 4 of 4 and 2 of 6 drafts. Linearised by hand: 0.24.
    assert row["rate"]["error"] == pytest.approx((2 * (1.6**2 + 1.6**2)) ** 0.5 / 10)


def test_acceptance_of_a_self_draft_is_k_plus_one(tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    small = [
        "--each",
        "1",
        "--prompt-tokens",
        "40",
        "-n",
        "5",
        "--temperature",
        "0,1",
        "--slots",
        "5",
    ]
    small += ["--draft-max", "1", "--out", str(out)]
    assert acceptance.main(["--only", "self", "--verify", "rejection", *small]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["verify"], row["temperature"]) for row in rows] == [("rejection", 1.0)]
    assert rows[0]["length"] == {"value": 2.0, "error": 0.0}


def test_the_best_fixed_k_is_the_fastest() -> None:
    def row(method: str, k: int, factor: float, adaptive: bool = False) -> dict[str, Any]:
        values = [factor * number for number in range(10, 17)]
        row_values = {
            "method": method,
            "draft_max": k,
            "adaptive": adaptive,
            "concurrency": 4,
            "rounds": 10,
        }
        return {
            **row_values,
            "tokens_per_second": {"values": values},
            "drafted_per_position": [6, 3] if k else [],
        }

    rows = [
        row("plain", 0, 1.0),
        row("mtp", 1, 1.5),
        row("mtp", 2, 1.2),
        row("mtp", 2, 1.44, adaptive=True),
    ]
    case = auto_k.case_of(rows)
    assert case["best_k"] == 1 and case["auto_over_best"]["median"] == pytest.approx(0.96)
    assert case["auto_over_plain"]["interval"] == pytest.approx((1.44, 1.44))
    assert case["rounds_with_drafts"] == 0.6

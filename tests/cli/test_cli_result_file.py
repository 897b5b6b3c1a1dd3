"""Results of `spd bench`: read back, where what is damaged is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from spd.cli.commands.compare import read_result
from spd.errors import UsageError
from spd.runtime.lab.rows import compare_results, make_rows
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def write_result(path: Path, *removed: str | int, value: Any = None) -> Path:
    """A small whole result, with something in it taken away or replaced."""
    samples = [make_sample(config, r, 1.0 + 0.1 * r) for config in (0, 1) for r in range(3)]
    result: Any = {
        "schema": "spd.bench/1",
        "model": "m",
        "settings": {"max_tokens": 8, "ignore_eos": True},
        "prompts": {"code/1": "0"},
        "plans": [{"load": "auto"}],
        "rows": make_rows(samples, [PLAIN, DRAFT]),
    }
    inner = result = copy.deepcopy(result)
    for name in removed[:-1]:
        inner = inner[name]
    if removed:
        inner[removed[-1]] = value
        if value is None:
            del inner[removed[-1]]
    path.write_text(json.dumps(result))
    return path


def test_a_whole_result_is_read(tmp_path: Path) -> None:
    assert len(read_result(write_result(tmp_path / "a.json"))["rows"]) == 2


@pytest.mark.parametrize("name", ["bench_demo", "bench_pairs", "bench_concurrency", "bench_rate_draft_tp"])
def test_results_that_are_kept_without_their_passes_compare(name: str) -> None:
    kept = read_result(Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json")
    assert (
        len(compare_results(kept, kept, 0.03)["changes"]) == len(kept["rows"]) > 0 and "samples" not in kept
    )


@pytest.mark.parametrize(
    ("removed", "value"),
    [
        (("rows",), None),
        (("settings",), None),
        (("model",), None),
        (("rows", 1, "method"), None),
        (("rows", 0, "tokens_per_second"), None),
        (("rows", 0, "tokens_per_second", "low"), "slow"),
        (("rows",), 3),
        (("rows",), ["a"]),
        (("settings",), []),
    ],
)
def test_a_damaged_result_is_refused(tmp_path: Path, removed: tuple[Any, ...], value: Any) -> None:
    path = write_result(tmp_path / "a.json", *removed, value=value)
    with pytest.raises(UsageError, match=r"a\.json is a damaged result of spd bench") as caught:
        read_result(path)
    if value is None:
        assert caught.value.reason == (f"'{removed[-1]}' is missing",)

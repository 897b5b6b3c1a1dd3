"""The models of GPU kernels reproduce what was measured on an H200."""

import json

from benchmarks.gpu_model import ATTENTION, PLANNED_ATTENTION, REPORT, cases, table


def test_every_model_is_within_a_tenth_of_the_measured_time() -> None:
    rows = list(cases(json.loads(REPORT.read_text(encoding="utf-8"))))
    kinds = [row.kind for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "16 bits": 33,
        "attention": 6,
        "few bits": 9,
        "states": 8,
    }
    assert not [(row.name, row.ratio) for row in rows if not 0.9 <= row.ratio <= 1.1]
    assert table(rows).count("\n| ") == len(rows)


def test_chunks_cover_a_context_from_border_to_border() -> None:
    assert ATTENTION.chunks(4096 + 700) == [128] * 32 + [512, 188]
    assert PLANNED_ATTENTION.chunks(1500) == [128] * 8 + [256, 220]


def test_a_counter_balances_items_better_than_a_stride() -> None:
    assert PLANNED_ATTENTION.time(1, 32768) < ATTENTION.time(1, 32768)

"""The models of GPU kernels reproduce what was measured on an H200."""

import json

from benchmarks.gpu_model import (
    ATTENTION,
    CODE_ATTENTION,
    PLANNED_ATTENTION,
    REPORT,
    ROTARY_LAUNCH,
    ROTATING_ATTENTION,
    cases,
    table,
)


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


def test_attention_to_codes_is_predicted_to_meet_its_gate() -> None:
    """The gate is of 16 slots at 4096; one slot's short contexts gain little, for launches remain."""
    for slots, context, least in ((16, 4096, 1.6), (16, 32768, 1.8), (1, 4096, 1.2)):
        ratio = PLANNED_ATTENTION.time(slots, context) / CODE_ATTENTION.time(slots, context)
        assert least <= ratio < 2


def test_rotation_in_attention_is_predicted_to_cost_less_than_a_launch_for_one_slot() -> None:
    """Each run of many long contexts pays for it: a hundredth of their time."""
    for context in (1024, 4096, 32768):
        cost = ROTATING_ATTENTION.time(1, context) - PLANNED_ATTENTION.time(1, context)
        assert 0 < cost < ROTARY_LAUNCH
    many = ROTATING_ATTENTION.time(16, 32768) / PLANNED_ATTENTION.time(16, 32768)
    assert 1 < many < 1.015

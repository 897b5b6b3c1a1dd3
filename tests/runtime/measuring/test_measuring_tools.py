"""Rooflines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Floor, floor_of, measure_read_rate
from spd.runtime.models.weight_form import WIDE
from tests.helpers import read_model_config
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def test_the_floor_is_what_must_be_read(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3")
    config = read_model_config(folder)
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    output = config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    norms = 2 * config.hidden_size + 2 * config.head_dim
    layers = config.num_layers * (qkv + output + mlp + norms)
    head = config.vocab_size * config.hidden_size  # read once, whether it is the embedding or not
    found = floor_of(config, "bfloat16", WIDE)
    assert found is not None and found.weight_bytes == 2 * (layers + head + config.hidden_size)
    assert found.position_bytes == 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert found.seconds(10, 1e6) == pytest.approx((found.weight_bytes + 10 * found.position_bytes) / 1e6)
    assert measure_read_rate("cpu") > 1e8


def test_shares_of_the_floor() -> None:
    sample = make_sample(1, 0, 1.0, drafted_per_position=[10, 10], draft_ms=4.0, verify_ms=10.0)
    plain = make_sample(0, 0, 1.0, verify_ms=8.0)
    floors = {0: (Floor(1000, 0), None), 1: (Floor(1000, 0), Floor(100, 0))}
    rows = make_rows([plain, sample], {0: PLAIN, 1: DRAFT}, floors, read_rate=250_000.0)
    assert rows[0]["roofline"]["verify_share"] == pytest.approx(0.5)
    assert rows[1]["roofline"]["verify_share"] == pytest.approx(0.4)
    assert rows[1]["roofline"]["draft_share"] == pytest.approx(0.4 / 2.0)  # 2 ms a draft
    assert make_rows([plain], {0: PLAIN})[0]["roofline"] is None
    beside = make_rows([plain, sample], {0: PLAIN, 1: {**DRAFT, "spec": "draft+ngram"}}, floors, 250_000.0)
    assert beside[1]["roofline"]["draft_share"] is None, "some drafts took no pass"

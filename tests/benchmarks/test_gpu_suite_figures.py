"""What the GPU suite computes of what it measures: bytes, gains, intervals."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.gpu_suite import shapes
from benchmarks.gpu_suite.speculation import gain
from benchmarks.summaries import median_interval
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from tests.helpers import read_model_config

TINY = shapes.Shape("tiny", hidden=8, layers=3, heads=4, kv_heads=2, intermediate=16, vocab=100, head_dim=4)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (shapes.QWEN3_06B, 596_049_920),
        (shapes.QWEN3_17B, 1_720_574_976),
        (shapes.QWEN3_4B, 4_022_468_096),
        (shapes.QWEN3_8B, 8_190_735_360),
        (shapes.QWEN3_32B, 32_762_123_264),
        (shapes.LLAMA_8B, 8_030_261_248),
        (shapes.EAGLE_SIZE, shapes.EAGLE_SIZE.parameters()),
        (shapes.EAGLE3_8B, shapes.EAGLE3_8B.parameters()),
    ],
)
def test_shapes_have_the_published_parameters_and_are_read_so(
    shape: shapes.Shape, parameters: int, tmp_path: Path
) -> None:
    config = read_model_config(shapes.write_folder(shape, tmp_path))
    tensors = expected_tensors(config, family_layout(config)).values()
    assert sum(prod(size) for size in tensors) == shape.parameters() == parameters
    kind, theta = ("llama3", 500000.0) if shape.family == "llama" else ("default", 1000000.0)
    assert (config.head_dim, config.dtype) == (128, "bfloat16")
    assert (config.rope.kind, config.rope.theta) == (kind, theta)


def test_bytes_of_a_round_by_hand_and_by_part() -> None:
    # A layer: qkv (4 + 2 + 2) * 4 x 8 = 256, out 8 x 16 = 128, gate and up 32 x 8 = 256, down 8 x 16 = 128.
    layer, head, kv = 768, 800, 2 * 3 * 2 * 4 * 2
    weights = 2 * (3 * layer + head)
    assert TINY.kv_bytes() == kv and shapes.forward_bytes(TINY, [10, 20]) == weights + 2 * 2 * 8 + 30 * kv
    parts = {"layers": 2 * 3 * layer, "head": 2 * head, "embedding": 2 * 5 * 2 * 8}
    assert shapes.forward_parts(TINY, [10, 20], rows=5) == {**parts, "keys and values": 30 * kv}
    # Three drafts: two rows, then one row at each further position.
    drafts = 3 * weights + (2 + 1 + 1) * 2 * 8 + (10 + 11 + 12) * kv
    assert shapes.draft_bytes(TINY, [10], 3) == drafts and shapes.draft_bytes(TINY, [10], 0) == 0
    assert shapes.round_bytes(TINY, TINY, [10], 3) == shapes.forward_bytes(TINY, [10], rows=4) + drafts
    assert shapes.round_bytes(TINY, None, [10], 0) == shapes.forward_bytes(TINY, [10])
    tied = shapes.Shape("tied", 8, 1, 4, 2, 16, vocab=100, head_dim=4, tied=True)
    parts = shapes.round_parts(TINY, tied, [10], 3)
    assert parts["target embedding"] == 4 * 2 * 8 and parts["target keys and values"] == 10 * kv
    assert parts["draft layers"] == 3 * 2 * layer and parts["draft head"] == 3 * 2 * head
    assert parts["draft embedding"] == (2 + 1 + 1) * 2 * 8
    assert parts["draft keys and values"] == (10 + 11 + 12) * kv // 3
    assert sum(parts.values()) == shapes.round_bytes(TINY, tied, [10], 3)


def test_gain_of_a_perfect_and_of_a_published_round() -> None:
    plain = shapes.round_bytes(shapes.QWEN3_8B, None, [1000], 0) / 4.0e12
    speculative = shapes.round_bytes(shapes.QWEN3_8B, shapes.EAGLE_SIZE, [1000], 4) / 4.0e12
    perfect = gain(3.08, plain, speculative, plain, speculative)
    assert perfect.share_of_ceiling == pytest.approx(1) and perfect.efficiency == pytest.approx(1)
    assert perfect.ideal_cost == pytest.approx(1.225, abs=0.002)
    # vLLM's EAGLE-3 table: 7.07 ms plain, 3.08 tokens in 12.5 ms: 1.75 times as fast, efficiency 0.70.
    vllm = gain(3.08, 7.07e-3, 12.47e-3, plain, speculative)
    assert vllm.speedup == pytest.approx(1.75, abs=0.01) and vllm.efficiency == pytest.approx(0.70, abs=0.01)


def test_interval_of_the_median() -> None:
    # By the binomial table: ranks 10 and 21 of 30 hold the median with probability 0.957, 11 and 20 with 0.9.
    assert median_interval([float(i) for i in range(30, 0, -1)]) == (10, 21)
    assert median_interval([float(i) for i in range(1, 11)]) == (2, 9)
    assert median_interval([float(i) for i in range(1, 7)]) == (1, 6)
    assert median_interval([1.0] * 5) is None and median_interval([]) is None
    assert median_interval([float(i) for i in range(1, 31)], confidence=0.9) == (11, 20)

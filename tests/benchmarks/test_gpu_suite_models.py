"""What the GPU suite computes rather than measures: shapes, bytes, imposed acceptance, gains, intervals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu_suite.shapes import (
    EAGLE3_8B,
    EAGLE_SIZE,
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_8B,
    QWEN3_17B,
    QWEN3_32B,
    SHAPES,
    Eagle3Shape,
    Shape,
    draft_bytes,
    forward_bytes,
    forward_parts,
    round_bytes,
    round_parts,
    shortened,
    write_folder,
)
from benchmarks.gpu_suite.speculation import acceptance_rate, gain, mean_length, reference_length
from benchmarks.summaries import median_interval
from spd.formats.model_config import read_model_config
from spd.runtime.lab.statistics import percentile
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors

TINY = Shape("tiny", hidden=8, layers=3, heads=4, kv_heads=2, intermediate=16, vocab=100, head_dim=4)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (QWEN3_06B, 596_049_920),
        (QWEN3_17B, 1_720_574_976),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_32B, 32_762_123_264),
        (LLAMA_8B, 8_030_261_248),
    ],
)
def test_shapes_have_the_published_number_of_parameters(shape: Shape, parameters: int) -> None:
    assert shape.parameters() == parameters


@pytest.mark.parametrize("shape", [*SHAPES, EAGLE_SIZE, EAGLE3_8B], ids=lambda shape: shape.name)
def test_folders_are_read_as_the_shape(shape: Shape, tmp_path: Path) -> None:
    config = read_model_config(write_folder(shape, tmp_path))
    tensors = expected_tensors(config, family_layout(config))
    sizes = [a if len(rest) == 0 else a * rest[0] for a, *rest in tensors.values()]
    assert sum(sizes) == shape.parameters()
    assert config.head_dim == 128 and config.dtype == "bfloat16"
    assert config.rope.kind == ("llama3" if shape.family == "llama" else "default")
    assert config.rope.theta == (500000.0 if shape.family == "llama" else 1000000.0)
    layers = json.loads((write_folder(shortened(shape), tmp_path) / "config.json").read_text())
    assert layers["num_hidden_layers"] == 1 and layers["hidden_size"] == shape.hidden


def test_bytes_of_known_models() -> None:
    # Linear weights and head at two bytes: the figures other projects give for these models.
    assert 2 * QWEN3_8B.read_weights() == pytest.approx(15.14e9, rel=1e-3)
    assert 2 * LLAMA_8B.read_weights() == pytest.approx(15.01e9, rel=1e-3)
    assert 2 * QWEN3_06B.read_weights() == pytest.approx(1.19e9, rel=2e-3)
    assert 2 * QWEN3_32B.read_weights() == pytest.approx(63.97e9, rel=1e-3)
    assert 2 * EAGLE_SIZE.read_weights() == pytest.approx(0.853e9, rel=1e-3)
    # By hand: pairs 2 x 8192 x 6144, out 2 x 4096 x 4096, MLP 6 x 4096 x 12288, head 2 x 32000 x 4096.
    assert 2 * EAGLE3_8B.read_weights() == 698_351_616
    assert 2 * EAGLE3_8B.once_a_round() == 2 * 3 * 4096 * 4096
    assert QWEN3_8B.kv_bytes() == 147_456 and LLAMA_8B.kv_bytes() == 131_072


def test_bytes_of_a_round_by_hand() -> None:
    # A layer: qkv (4 + 2 + 2) * 4 x 8 = 256, out 8 x 16 = 128, gate and up 32 x 8 = 256, down 8 x 16 = 128.
    layer, head, kv = 768, 800, 2 * 3 * 2 * 4 * 2
    assert TINY.read_weights() == 3 * layer + head
    assert TINY.kv_bytes() == kv
    weights = 2 * (3 * layer + head)
    assert forward_bytes(TINY, [10, 20]) == weights + 2 * 2 * 8 + 30 * kv
    assert forward_bytes(TINY, [10], rows=5) == weights + 5 * 2 * 8 + 10 * kv
    # Three drafts: two rows, then one row at each further position.
    drafts = 3 * weights + (2 + 1 + 1) * 2 * 8 + (10 + 11 + 12) * kv
    assert draft_bytes(TINY, [10], 3) == drafts and draft_bytes(TINY, [10], 0) == 0
    assert round_bytes(TINY, TINY, [10], 3) == forward_bytes(TINY, [10], rows=4) + drafts
    assert round_bytes(TINY, None, [10], 0) == forward_bytes(TINY, [10])


def test_bytes_of_a_round_by_part() -> None:
    layer, head, kv = 768, 800, 2 * 3 * 2 * 4 * 2
    assert forward_parts(TINY, [10, 20], rows=5) == {
        "layers": 2 * 3 * layer,
        "head": 2 * head,
        "embedding": 2 * 5 * 2 * 8,
        "keys and values": 30 * kv,
    }
    tied = Shape("tied", 8, 1, 4, 2, 16, vocab=100, head_dim=4, tied=True)
    parts = round_parts(TINY, tied, [10], 3)
    assert parts["target embedding"] == 4 * 2 * 8 and parts["target keys and values"] == 10 * kv
    assert parts["draft layers"] == 3 * 2 * layer and parts["draft head"] == 3 * 2 * head
    assert parts["draft embedding"] == (2 + 1 + 1) * 2 * 8
    assert parts["draft keys and values"] == (10 + 11 + 12) * kv // 3
    assert sum(parts.values()) == round_bytes(TINY, tied, [10], 3)
    assert list(round_parts(TINY, None, [10], 0)) == list(parts)[:4] == list(round_parts(TINY, tied, [10], 0))


def test_bytes_of_a_head_that_reads_its_targets_streams() -> None:
    head = Eagle3Shape("head", 8, 1, 4, 2, 16, vocab=100, head_dim=4, family="llama", draft_vocab=10)
    # Pairs 32 x 16 = 512, out 8 x 16 = 128, gate and up 32 x 8 = 256, down 8 x 16 = 128; ids 10 x 8.
    parts = round_parts(TINY, head, [10], 3)
    assert parts["draft layers"] == 3 * 2 * 1024 and parts["draft head"] == 3 * 2 * 80
    assert parts["draft target's streams"] == 2 * 8 * 24
    assert draft_bytes(head, [10], 3) - draft_bytes(head, [10], 2) == 2 * 1104 + 2 * 8 + 12 * 32
    assert "draft target's streams" not in round_parts(TINY, head, [10], 0)


def test_a_tied_head_is_read_once_and_stored_once() -> None:
    tied = Shape("tied", 8, 3, 4, 2, 16, vocab=100, head_dim=4, tied=True)
    assert tied.read_weights() == TINY.read_weights()
    assert TINY.parameters() - tied.parameters() == 800


def test_imposed_acceptance() -> None:
    assert mean_length(0.5, 3) == 1.875
    assert acceptance_rate(1.875, 3) == pytest.approx(0.5, abs=1e-9)
    assert acceptance_rate(1.0, 4) == pytest.approx(0.0, abs=1e-9)
    assert acceptance_rate(5.0, 4) == 1.0
    rate = acceptance_rate(3.08, 4)
    assert rate + rate**2 + rate**3 + rate**4 == pytest.approx(2.08)
    assert reference_length(4) == pytest.approx(3.08)
    assert reference_length(1) == pytest.approx(1 + rate)
    for wrong in (0.9, 5.1):
        with pytest.raises(ValueError, match="no acceptance"):
            acceptance_rate(wrong, 4)


def test_the_engine_imposes_the_same_rate() -> None:
    imposed = pytest.importorskip("spd.runtime.round.synthetic_acceptance")
    assert imposed.conditional_rate(3.08, 4) == pytest.approx(acceptance_rate(3.08, 4), abs=1e-6)
    # One rate serves every k, so that an engine made for the most drafts may be run at fewer.
    assert imposed.conditional_rate(reference_length(7), 7) == pytest.approx(
        acceptance_rate(3.08, 4), abs=1e-6
    )


def test_gain_of_a_perfect_and_of_a_published_round() -> None:
    plain = round_bytes(QWEN3_8B, None, [1000], 0) / 4.0e12
    speculative = round_bytes(QWEN3_8B, EAGLE_SIZE, [1000], 4) / 4.0e12
    perfect = gain(3.08, plain, speculative, plain, speculative)
    assert perfect.share_of_ceiling == pytest.approx(1) and perfect.efficiency == pytest.approx(1)
    assert perfect.ideal_cost == pytest.approx(1.225, abs=0.002)
    # vLLM's EAGLE-3 table: 7.07 ms plain, 3.08 tokens in 12.5 ms: 1.75 times as fast, efficiency 0.70.
    vllm = gain(3.08, 7.07e-3, 12.47e-3, plain, speculative)
    assert vllm.speedup == pytest.approx(1.75, abs=0.01) and vllm.efficiency == pytest.approx(0.70, abs=0.01)


def test_percentile_is_the_nearest_rank() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.21, 0.9, 1.0)] == [1, 1, 2, 5, 5]
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_interval_of_the_median() -> None:
    # By the binomial table: ranks 10 and 21 of 30 hold the median with probability 0.957, 11 and 20 with 0.9.
    assert median_interval([float(i) for i in range(30, 0, -1)]) == (10, 21)
    assert median_interval([float(i) for i in range(1, 11)]) == (2, 9)
    assert median_interval([float(i) for i in range(1, 7)]) == (1, 6)
    assert median_interval([1.0] * 5) is None and median_interval([]) is None
    assert median_interval([float(i) for i in range(1, 31)], confidence=0.9) == (11, 20)

"""What the GPU suite computes of what it measures: bytes, shares, imposed acceptance, gains, intervals."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu_suite import batches, latency, peers_gpu, shapes
from benchmarks.gpu_suite import sparse_cases as sparse_cases_module
from benchmarks.gpu_suite.graph_nodes import slope
from benchmarks.gpu_suite.graph_timer import ROTATED_BYTES, GraphTimer, Once
from benchmarks.gpu_suite.kernel_cases import Bench
from benchmarks.gpu_suite.kernel_table import eight_over_one, run_case
from benchmarks.gpu_suite.round_times import Recorder, RoundTimes, Span, describe_span
from benchmarks.gpu_suite.sparse_cases import experts_case, latent_case, other_experts, sparse_cases
from benchmarks.gpu_suite.speculation import acceptance_rate, gain, mean_length, reference_length
from benchmarks.summaries import median_interval
from spd.kernels.dispatch import load_kernels
from spd.runtime.engine.metrics import RequestMetrics
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


def test_bytes_of_known_models() -> None:
    # Linear weights and head at two bytes: the figures other projects give for these models.
    assert 2 * shapes.QWEN3_8B.read_weights() == pytest.approx(15.14e9, rel=1e-3)
    assert 2 * shapes.LLAMA_8B.read_weights() == pytest.approx(15.01e9, rel=1e-3)
    assert 2 * shapes.QWEN3_06B.read_weights() == pytest.approx(1.19e9, rel=2e-3)
    assert 2 * shapes.QWEN3_32B.read_weights() == pytest.approx(63.97e9, rel=1e-3)
    assert 2 * shapes.EAGLE_SIZE.read_weights() == pytest.approx(0.853e9, rel=1e-3)
    # By hand: pairs 2 x 8192 x 6144, out 2 x 4096 x 4096, MLP 6 x 4096 x 12288, head 2 x 32000 x 4096.
    assert 2 * shapes.EAGLE3_8B.read_weights() == 698_351_616
    assert 2 * shapes.EAGLE3_8B.once_a_round() == 2 * 3 * 4096 * 4096
    assert shapes.QWEN3_8B.kv_bytes() == 147_456 and shapes.LLAMA_8B.kv_bytes() == 131_072


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


def test_bytes_of_a_head_that_reads_its_targets_streams() -> None:
    head = shapes.Eagle3Shape("head", 8, 1, 4, 2, 16, vocab=100, head_dim=4, family="llama", draft_vocab=10)
    # Pairs 32 x 16 = 512, out 8 x 16 = 128, gate and up 32 x 8 = 256, down 8 x 16 = 128; ids 10 x 8.
    parts = shapes.round_parts(TINY, head, [10], 3)
    assert parts["draft layers"] == 3 * 2 * 1024 and parts["draft head"] == 3 * 2 * 80
    assert parts["draft target's streams"] == 2 * 8 * 24
    assert shapes.draft_bytes(head, [10], 3) - shapes.draft_bytes(head, [10], 2) == 2 * 1104 + 2 * 8 + 12 * 32
    assert "draft target's streams" not in shapes.round_parts(TINY, head, [10], 0)


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


def test_times_of_a_span_by_hand() -> None:
    def one(began: int, committed: int, ended: int) -> RoundTimes:
        return RoundTimes(4, began, committed, ended, 3000)

    # The first two are left out: one was on its way, one followed an idle device.
    records = [one(0, 1, 2), one(0, 1, 2), one(10_000, 13_000, 14_000), one(16_000, 20_000, 22_000)]
    found = describe_span(Span(4, 40e-6, 24, records), slots=2, lag=1)
    assert found["wall_us"] == pytest.approx(10) and found["tokens_a_round"] == 3
    assert found["period_us"] == [6, 6] and found["idle_us"] == [2, 2]
    assert found["device_us"] == [5, 6] and found["verify_us"] == [3.5, 4] and found["draft_us"] == [1.5, 2]
    assert found["host_waits_us"] == 3


def test_gaps_between_tokens_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RequestMetrics(completion_tokens=8, first_tokens=2, predicted_ms=30.0)
    metrics.outcomes[4, 1] = 4
    seconds = [0.0, 0.01, 0.015, 0.035]
    monkeypatch.setattr(latency, "run_alone", lambda engine, prompt, tokens: (metrics, seconds))
    found = latency.token_gaps(SimpleNamespace(plan=SimpleNamespace(lag=1)), 5, 8, 300)  # type: ignore[arg-type]
    assert found["itl_ms"] == pytest.approx([10, 20]) and found["tpot_ms"] == 5
    assert (found["acceptance_rate"], found["acceptance_length"], found["rounds"]) == (0.25, 2, 4)


def test_a_runner_counts_what_rounds_commit_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [RoundTimes(k, 0, 0, 0, 0) for k in (0, 4)]
    monkeypatch.setattr(batches, "run_span", lambda *given, **named: Span(2, 0.5, 99, records))
    runner = batches.Runner(None, Recorder(), slots=3, rate=1.0)
    runner.turn()
    # Rounds of 1 and of 5 tokens for each of 3 slots in half a second.
    assert runner.rates == [36.0]


def _contender(seconds: float, clock: list[float]) -> Callable[[int], None]:
    def generate(tokens: int) -> None:
        clock[0] += 1.0 + seconds * tokens

    return generate


def test_contenders_are_timed_without_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.gpu_suite.peers_gpu.time.perf_counter", lambda: clock[0])

    def broken(tokens: int) -> None:
        raise RuntimeError("cannot")

    contenders = {"peer": _contender(0.02, clock), "broken": broken, "spd plain": _contender(0.005, clock)}
    first, *_, result = peers_gpu.interleave(contenders, turns=3, seconds=1e9)
    assert [len(first["tokens_a_second"][name]["values"]) for name in ("peer", "spd plain")] == [1, 1]
    speeds = result["tokens_a_second"]
    assert speeds["peer"]["median"] == pytest.approx(50) and speeds["spd plain"]["median"] == pytest.approx(
        200
    )
    assert list(result["ratios"]) == ["spd plain / peer"]
    assert result["ratios"]["spd plain / peer"]["median"] == pytest.approx(4)
    assert result["errors"] == {"broken": "RuntimeError: cannot"}


def test_shares_and_ratios_of_the_table() -> None:
    class Timed(Once):
        def microseconds(self, calls: Any) -> float:
            return 2.0

    bench = Bench(load_kernels("torch"), Timed("cpu"), torch.float32, 4e9)
    # 4000 bytes in 2 us are 2e9 bytes a second, half of what can be read.
    assert bench.row([lambda: 0], 4000, [lambda: 0]) == [2.0, 0.5, 2.0]
    assert bench.row([lambda: 0], None) == [2.0, None, None]
    assert eight_over_one({"1": [2.0, None, 4.0], "8": [2.2, None, 5.0]})["8_over_1"] == pytest.approx(
        [1.1, 1.25]
    )
    assert eight_over_one({"1": [2.0, None, 4.0]}) == {}

    def broken(bench: Bench) -> Any:
        raise RuntimeError("no such kernel")

    assert run_case(broken, bench) == {"error": "RuntimeError: no such kernel"}


@torch.inference_mode()
def test_bytes_are_those_of_the_experts_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Timed(Once):
        def microseconds(self, calls: Any) -> float:
            return 1.0

    bench = Bench(load_kernels("torch"), Timed("cpu"), torch.float32, 1e6)
    one = 3 * 32 * 48 * 4
    rows = experts_case(bench, 4, 2, 48, 32, "wide", (1,))
    assert rows["1"][1] == pytest.approx(2 * one)
    assert experts_case(bench, 4, 4, 48, 32, "wide", (2,))["2"][1] == pytest.approx(4 * one)
    assert latent_case(bench, 2, 16, 8, 2, 128, (1,))["1"][1] == pytest.approx(2 * 128 * 24 * 4)
    assert bench.notes == []
    monkeypatch.setattr(sparse_cases_module, "CACHE_BYTES", 0)
    rows = latent_case(bench, 2, 16, 8, 2, 300, (1, 4))
    for width in (1, 4):
        partials = 2 * 3 * width * 2 * 16 * 4  # three chunks for each of two slots, and two heads
        assert rows[str(width)][1] == pytest.approx(2 * 300 * 24 * 4 + 2 * partials)
    assert len(bench.notes) == 2


@pytest.mark.parametrize(
    ("model", "rows"), [("DeepSeek-V3 fp8", 1), ("DeepSeek-V3 fp8", 64), ("DeepSeek-V2-Lite", 8)]
)
def test_experts_come_again_when_the_cache_has_lost_them(model: str, rows: int) -> None:
    """Otherwise the few that one row goes to would be read from the cache."""
    case: Any = sparse_cases()[f"experts {model}"]
    sizes, width = case.keywords, 1 if "fp8" in model else 2
    count, each = sizes["count"], 3 * sizes["hidden"] * sizes["inner"] * width
    ids = torch.rand(rows, count).argsort(-1)[:, : sizes["per_token"]]
    touched = len(ids.unique())
    copies = GraphTimer.copies(cast(GraphTimer, None), touched * each)
    turns = other_experts(ids, count, copies)
    chosen = [set(one.flatten().tolist()) for one in turns]
    assert sum(map(len, chosen)) == len(set.union(*chosen)) == len(turns) * touched, "all are others"
    assert len(turns) * touched * each >= ROTATED_BYTES
    for one in turns:
        assert one.shape == ids.shape and all(len(set(row)) == len(row) for row in one.tolist())


def test_partial_results_of_latent_attention_count_where_the_cache_cannot_hold_them() -> None:
    v3 = sparse_cases_module.partial_bytes(16 * 128, 4096, 512)
    assert v3 == 2 * 134_217_728 > 16 * 4096 * 576 * 2, "more than the latents themselves"
    assert sparse_cases_module.partial_bytes(128, 32768, 512) == 0
    assert sparse_cases_module.partial_bytes(16 * 128, 32768, 512) == 2 * 88 * 16 * 128 * 512 * 4
    assert sparse_cases_module.partial_bytes(16 * 16, 32768, 512) == 0, "V2-Lite's 46 MB stay in the cache"


def test_slope_of_a_line() -> None:
    rise, fixed = slope((50.0, 100.0, 400.0), (70.0, 130.0, 490.0))
    assert rise == pytest.approx(1.2) and fixed == pytest.approx(10.0)

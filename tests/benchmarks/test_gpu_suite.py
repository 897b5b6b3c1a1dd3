"""The GPU suite without a GPU: its isolation, its report, and checks that find planted faults."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from spd.formats.mtp import find_mtp_source

pytest.importorskip("triton")

from benchmarks.gpu_suite import __main__ as command
from benchmarks.gpu_suite import shapes, sparse_models, spd_rounds
from benchmarks.gpu_suite.digest import RENDERERS
from benchmarks.gpu_suite.report import REPORT
from benchmarks.gpu_suite.round_settings import Setting
from benchmarks.gpu_suite.spd_rounds import Outcome, compare
from benchmarks.gpu_suite.speculation import gain
from benchmarks.gpu_suite.suite import PROBES, Probe, load_function, run_suite
from benchmarks.summaries import median_interval
from spd.formats.folder import ModelFolder
from spd.runtime import check_mtp_source
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from tests.helpers import read_model_config
from tests.recipes.medium import write_medium, write_medium_draft

HERE = "tests.benchmarks.fake_probes"


COMPARED = {"differing_tokens": 0, "compared_tokens": 50_000, "differing_counts": 0, "settings": {}}
MET = {"status": "ok", "result": COMPARED}
STATIC = {
    "a": {"ratios": {"spd plain / transformers static compiled": {"median": 0.9}}, "errors": {}}
}
"""Asks for nothing, also below 1."""


@pytest.mark.parametrize(
    ("probes", "status"),
    [
        ({"self_draft": MET}, 0),
        ({"self_draft": {"status": "ok", "result": {**COMPARED, "differing_tokens": 1}}}, 1),
        (
            {"self_draft": MET, "spd_demo": {"status": "ok", "result": {**COMPARED}}},
            1,
        ),  # too few tokens
        ({"self_draft": MET, "device": {"status": "failed", "error": ["E"]}}, 1),
        ({"self_draft": {**MET, "status": "cut short"}}, 4),
        ({"peers_static": {"status": "ok", "result": STATIC}}, 0),
        ({"self_draft": MET, "draft": {"status": "ok", "result": {"pairs": {}}}}, 4),
        ({"self_draft": {"status": "cut short", "result": {**COMPARED, "differing_counts": 2}}}, 1),
        (
            {"self_draft": MET, "warm_up": {"status": "failed", "error": ["E"]}},
            0,
        ),  # of an earlier run
    ],
)
def test_the_exit_status_says_what_was_missed_and_what_was_left_out(
    probes: dict[str, Any],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.setattr(command, "gpu_is_there", lambda: True)
    monkeypatch.setattr(command, "run_suite", lambda *args, **kwargs: {"probes": probes})
    only = ",".join(name for name in probes if name != "warm_up")
    assert command.main(["--out", str(tmp_path), "--only", only]) == status
    assert ("NOT met" in capsys.readouterr().out) <= (status == 1)


def test_a_probe_that_fails_dies_or_hangs_loses_neither_others_nor_what_it_had_found(
    tmp_path: Path,
) -> None:
    functions = {"fails": "grow_and_fail", "dies": "die", "is long": "grow_forever"}
    functions |= {"works": "say:hello", "is late": "say:late"}
    probes = [
        Probe(name, f"{HERE}:{f}", 12 if name == "is long" else 60) for name, f in functions.items()
    ]
    report = run_suite(tmp_path, probes[:4], 200, lambda line: None)["probes"]
    assert [probe_result["status"] for probe_result in report.values()] == [
        "failed",
        "died",
        "cut short",
        "ok",
    ]
    assert report["fails"]["result"] == {"found": [1]} and report["works"]["result"] == {
        "word": "hello"
    }
    assert len(report["is long"]["result"]["found"]) > 2
    assert set(report["is long"]["result"]["found"]) == {0.33333}
    assert json.loads((tmp_path / REPORT).read_text())["probes"] == report
    late = run_suite(tmp_path, [probes[2], probes[4]], 5, lambda line: None)["probes"]
    assert late["is late"]["status"] == "not run", "the budget is kept"


def test_every_probe_is_a_function_and_has_words() -> None:
    assert all(callable(load_function(probe.function)) for probe in PROBES)
    assert {probe.name for probe in PROBES} == set(RENDERERS)
    assert sum(probe.seconds for probe in PROBES if probe.is_default) <= 540


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a small model and its draft."""
    place = tmp_path_factory.mktemp("pair")
    shape = {
        "hidden": 64,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
    }
    folder = write_medium(place / "target", "float32", vocab=300, max_positions=256, **shape)
    return folder, write_medium_draft(place / "draft", folder)


PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 60)), [3]]


def test_a_changed_token_and_a_changed_count_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = spd_rounds.generate

    def faulty(engine: Any, jobs: Any, prompts: Any, tokens: int) -> Any:
        outcomes = generate(engine, jobs, prompts, tokens)
        if engine.plan.spec == "draft" and engine.plan.lag == 1:
            first_outcome = outcomes[jobs[0]]
            outcomes[jobs[0]] = Outcome(
                (first_outcome.ids[0] + 1, *first_outcome.ids[1:-1]),
                (*first_outcome.counts[:1], 99),
                0,
            )
        return outcomes

    monkeypatch.setattr(spd_rounds, "generate", faulty)
    settings = (Setting("draft", 2), Setting("draft", 2, lag=1))
    options: dict[str, Any] = {
        "device": "cpu",
        "settings": settings,
        "runs": ("greedy",),
        "threads": 1,
    }
    folder, draft = pair
    *_, result = compare(folder, draft, PROMPTS[:1], tokens=6, **options)
    rows = result["settings"]
    assert (rows["draft_k2"]["differing_tokens"], rows["draft_k2"]["other_counts"]) == (0, 0)
    # One token is another, one is missing.
    assert (rows["draft_k2_lag1"]["differing_tokens"], rows["draft_k2_lag1"]["other_counts"]) == (
        2,
        1,
    )
    assert (result["differing_tokens"], result["differing_counts"]) == (2, 1)


TINY = shapes.Shape(
    "tiny", hidden=8, layers=3, heads=4, kv_heads=2, intermediate=16, vocab=100, head_dim=4
)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (shapes.QWEN3_06B, 596_049_920),
        (shapes.QWEN3_17B, 1_720_574_976),
        (shapes.QWEN3_4B, 4_022_468_096),
        (shapes.QWEN3_8B, 8_190_735_360),
        (shapes.QWEN3_32B, 32_762_123_264),
        (shapes.LLAMA_8B, 8_030_261_248),
        *((shape, shape.parameters()) for shape in (shapes.EAGLE_SIZE, shapes.EAGLE3_8B)),
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


def test_bytes_of_a_round_are_those_counted_by_hand() -> None:
    # A layer: qkv (4 + 2 + 2) * 4 x 8 = 256, out 8 x 16 = 128, gate and up 32 x 8 = 256, down 8 x 16 = 128.
    layer = 768
    head = 800
    kv = 2 * 3 * 2 * 4 * 2
    weights = 2 * (3 * layer + head)
    assert (
        TINY.kv_bytes() == kv
        and shapes.forward_bytes(TINY, [10, 20]) == weights + 2 * 2 * 8 + 30 * kv
    )
    parts = {"layers": 2 * 3 * layer, "head": 2 * head, "embedding": 2 * 5 * 2 * 8}
    assert shapes.forward_parts(TINY, [10, 20], rows=5) == {**parts, "keys and values": 30 * kv}
    # Three drafts: two rows, then one row at each further position.
    drafts = 3 * weights + (2 + 1 + 1) * 2 * 8 + (10 + 11 + 12) * kv
    assert shapes.draft_bytes(TINY, [10], 3) == drafts and shapes.draft_bytes(TINY, [10], 0) == 0
    assert (
        shapes.round_bytes(TINY, TINY, [10], 3) == shapes.forward_bytes(TINY, [10], rows=4) + drafts
    )
    assert shapes.round_bytes(TINY, None, [10], 0) == shapes.forward_bytes(TINY, [10])
    tied = shapes.Shape("tied", 8, 1, 4, 2, 16, vocab=100, head_dim=4, tied=True)
    parts = shapes.round_parts(TINY, tied, [10], 3)
    assert parts["target embedding"] == 4 * 2 * 8 and parts["target keys and values"] == 10 * kv
    assert parts["draft layers"] == 3 * 2 * layer and parts["draft head"] == 3 * 2 * head
    assert parts["draft embedding"] == (2 + 1 + 1) * 2 * 8
    assert parts["draft keys and values"] == (10 + 11 + 12) * kv // 3
    assert sum(parts.values()) == shapes.round_bytes(TINY, tied, [10], 3)


def test_the_gain_of_a_round_is_that_published() -> None:
    plain = shapes.round_bytes(shapes.QWEN3_8B, None, [1000], 0) / 4.0e12
    speculative = shapes.round_bytes(shapes.QWEN3_8B, shapes.EAGLE_SIZE, [1000], 4) / 4.0e12
    perfect = gain(
        length=3.08,
        plain_seconds=plain,
        round_seconds=speculative,
        plain_floor=plain,
        round_floor=speculative,
    )
    assert perfect.share_of_ceiling == pytest.approx(1) and perfect.efficiency == pytest.approx(1)
    assert perfect.ideal_cost == pytest.approx(1.225, abs=0.002)
    # vLLM's EAGLE-3 table: 7.07 ms plain, 3.08 tokens in 12.5 ms: 1.75 times as fast, efficiency 0.70.
    vllm = gain(
        length=3.08,
        plain_seconds=7.07e-3,
        round_seconds=12.47e-3,
        plain_floor=plain,
        round_floor=speculative,
    )
    assert vllm.speedup == pytest.approx(1.75, abs=0.01) and vllm.efficiency == pytest.approx(
        0.70, abs=0.01
    )


def test_the_interval_holds_the_median() -> None:
    # By the binomial table: ranks 10 and 21 of 30 hold the median with probability 0.957, 11 and 20 with 0.9.
    for count, interval in ((30, (10, 21)), (10, (2, 9)), (6, (1, 6)), (5, None), (0, None)):
        assert median_interval([float(i) for i in range(count, 0, -1)]) == interval
    assert median_interval([float(i) for i in range(1, 31)], confidence=0.9) == (11, 20)


@pytest.mark.parametrize("model", [sparse_models.MIMO, sparse_models.V3])
def test_a_hollow_checkpoint_has_its_mtp_head(
    model: sparse_models.Published, tmp_path: Path
) -> None:
    folder = ModelFolder(sparse_models.write_hollow(model, tmp_path))
    source = find_mtp_source(folder)
    assert source is not None
    assert source.layout.modules == model.modules == 1
    assert check_mtp_source(source, folder.checkpoint).keys() <= folder.checkpoint.tensors.keys()

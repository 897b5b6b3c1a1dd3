"""EAGLE-3 heads: read in every layout, and drafts against a plain reference, with several targets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spd.errors import CheckpointError
from spd.runtime import Engine, EngineConfig, SamplingParams, make_plan
from tests.helpers import edit_config, make_engine, random_prompts, run_all, write_altered_drafter
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.runtime.eagle3_reference import LibraryTarget, PlainEagle3
from tests.runtime.test_runtime_mtp import compare_drafts, generate_texts

SPECULATORS: dict[str, Any] = {"layout": "speculators", "norm_before_residual": None}
"""The most common published form: the residual is not stated, and is then the normed state."""
HEADS: dict[str, dict[str, Any]] = {
    "research": {},
    "research_aux": {"variant": "qwen3", "aux": (1, 4, 7), "norm_before_residual": True},
    "speculators": {"variant": "qwen3", **SPECULATORS},
    "speculators_aux": {**SPECULATORS, "norm_before_residual": False, "aux": (0, 3, 7)},
    "input_norm": {**SPECULATORS, "norm_before_fc": True, "norm_output": True},
    "fc_norms": {"variant": "qwen3", "fc_norm": True, "norm_output": True},
    "vllm": {"variant": "qwen3", "layout": "vllm", "aux": (3, 5, 6), "norm_before_fc": True},
    "two_parts": {"aux": (2, 5)},
    "five_parts": {"variant": "qwen3", **SPECULATORS, "aux": (1, 2, 3, 4, 6), "fc_norm": True},
    "all_ids": {**SPECULATORS, "draft_vocab": None},
    "no_output": {"variant": "qwen3", "draft_vocab": None, "own_head": False},
    "target_s_rows": {"variant": "qwen3", "own_head": False},
    "own_embedding": {"variant": "qwen3", "own_embedding": True},
    "wide": {"hidden_size": 96, "norm_output": True},
    "narrow": {"variant": "qwen3", **SPECULATORS, "hidden_size": 32, "fc_norm": True},
    "tied": {"target_options": {"tie": True}},
    "biases": {"variant": "biases"},
    "six_layers": {"target_options": {"layers": 6}},
    "deepseek_v3": {"variant": "deepseek_v3", **SPECULATORS},
    "deepseek_v3_lite": {"variant": "deepseek_v3_lite", "norm_before_fc": True, "hidden_size": 96},
    "glm4": {"variant": "glm4_moe"},
    "gpt_oss": {"variant": "gpt_oss", "aux": (2, 4, 6), "draft_vocab": None, "own_head": False},
}
BY_LIBRARY = ("deepseek_v3", "deepseek_v3_lite", "glm4", "gpt_oss")
RANDOM_ONLY = {"wide", "narrow", "tied", "biases", *BY_LIBRARY}
"""A copy needs a plain first layer of the head's size, and a target with damped layers."""
DEFAULT_LANE = {
    "research": 4,
    "speculators": 2,
    "input_norm": 3,
    "target_s_rows": 2,
    "vllm": 3,
    "own_embedding": 1,
    "wide": 3,
}
DEFAULT_LANE |= {"deepseek_v3": 2}
CASES = [
    pytest.param(name, k, marks=[pytest.mark.slow] * (DEFAULT_LANE.get(name) != k))
    for name in HEADS
    for k in (1, 2, 3, 4)
]


@pytest.mark.covers(count=4)
@pytest.mark.parametrize(("name", "k"), CASES)
def test_drafts_are_the_reference_s(tmp_path: Path, name: str, k: int) -> None:
    is_short = DEFAULT_LANE.get(name) == k
    kinds = ("random",) if name in RANDOM_ONLY else ("copy", "random")
    for kind in kinds[:1] if is_short else kinds:
        target = tmp_path / kind
        head = write_tiny_pair(target, tmp_path / f"{kind}-head", kind=kind, **HEADS[name])
        plain = PlainEagle3(target, head, LibraryTarget(target) if name in BY_LIBRARY else None)
        kernels = "torch" if k == 1 else "auto"
        engine = make_engine(target, spec="eagle3", draft_model=head, draft_max=k, kernels=kernels)
        runs = generate_texts(engine, 24 if is_short else 60)
        wrong, num_compared, rejected = compare_drafts(plain, runs, 6 if is_short else 1000)
        assert wrong == 0, (kind, wrong, num_compared)
        assert rejected > (5 if is_short else 20) and num_compared > (12 if is_short else 40)
        if kind == "copy":
            records = [record for _, run in runs for record in run.rounds if record.draft]
            accepted = sum(r.accepted for r in records)
            drafted = sum(len(r.draft) for r in records)
            assert 0.15 * drafted < accepted < 0.85 * drafted
            assert max(record.accepted for record in records) == k


Parts = dict[str, Tensor]
Pair = tuple[Path, Path]
PROMPTS = random_prompts(3, 20, 256)
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.8, 1.2)
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    return folder / "target", write_tiny_pair(folder / "target", folder / "head", kind="copy")


def write_altered_head(head: Path, place: Path, change: Callable[[Parts], object]) -> Path:
    """Write a copy of a head with changed tensors."""
    write_altered_drafter(head, place, change)
    rows = len(load_file(place / "model.safetensors")["d2t"])
    return edit_config(place, lambda config: config.update(draft_vocab_size=rows))


def make_head_engine(pair: Pair, head: Path | None = None) -> Engine:
    return make_engine(pair[0], spec="eagle3", draft_model=head or pair[1], draft_max=3)


def generate_outputs(engine: Engine) -> list[Any]:
    return [(run.output, run.drafts) for run in run_all(engine, PROMPTS, PARAMS)]


def test_draft_ids_may_have_any_order_and_integer_dtype(pair: Pair, tmp_path: Path) -> None:
    """A head whose rows are shuffled with their ids drafts the same."""

    def shuffled(tensors: Parts) -> None:
        """Shuffle the head's rows with their ids."""
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
        tensors["d2t"] = (ids[order] - torch.arange(len(ids))).int()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    head = write_altered_head(pair[1], tmp_path / "head", shuffled)
    assert generate_outputs(make_head_engine(pair, head)) == generate_outputs(
        make_head_engine(pair)
    )


def test_a_copy_of_the_target_s_embeddings_is_not_kept_twice(pair: Pair, tmp_path: Path) -> None:
    target_table = load_file(pair[0] / "model.safetensors")["model.embed_tokens.weight"]
    options: dict[str, Any] = {"model": pair[0], "draft_max": 3, "ctx": 256}
    without = make_plan(EngineConfig(draft_model=pair[1], **options))
    plain = generate_outputs(make_head_engine(pair))
    for same in (True, False):
        table = {"embed_tokens.weight": target_table if same else -target_table}
        folder = write_altered_head(pair[1], tmp_path / f"{same}", methodcaller("update", table))
        engine = make_head_engine(pair, folder)
        target = engine.round_queue.runner.model
        head = engine.round_queue.proposer.runners[0].model  # type: ignore[attr-defined]
        assert (head.embedding is target.embedding) == same == (generate_outputs(engine) == plain)
        plan_with_table = make_plan(EngineConfig(draft_model=folder, **options))
        assert plan_with_table.need.workspace - without.need.workspace == target_table.numel() * 4


OTHER_KIND = "weight: this kind of EAGLE-3 head is not supported"
DAMAGES: list[tuple[Callable[[Parts], object], str]] = [
    (lambda t: t["d2t"][5:7].copy_(torch.tensor([2**62 + 1, -(2**62)])), "d2t"),
    (lambda t: t["d2t"][1].copy_(t["d2t"][0] - 1), "different token ids below 320"),
    (lambda t: t["d2t"][3].fill_(-300), "different token ids below 320"),
    (lambda t: t.update({"embed_tokens.weight": torch.zeros(10, 64)}), "embed_tokens.weight"),
    (
        lambda t: t.update({"embed_tokens.weight": torch.zeros(320, 64).long()}),
        "embed_tokens.weight",
    ),
    (
        lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(64)}),
        f"q_norm.{OTHER_KIND}",
    ),
    (lambda t: t.update({"fc_norm.0.weight": torch.ones(64)}), f"fc_norm.0.{OTHER_KIND}"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGES)
def test_damaged_heads_are_refused(
    pair: Pair, tmp_path: Path, change: Callable[[Parts], object], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        make_head_engine(pair, write_altered_head(pair[1], tmp_path / "head", change))


def test_unused_tensors_are_logged(
    pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make_head_engine(
            pair,
            write_altered_head(
                pair[1], tmp_path / "head", lambda t: t.update(optimizer=torch.zeros(1))
            ),
        )
    assert "1 tensors of" in caplog.text and "'optimizer' first" in caplog.text

"""Block drafters: read in every dialect, and drafts against a plain reference."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import CheckpointError, SpdError, UsageError
from spd.runtime import SamplingParams
from spd.runtime.proposers.block import BlockProposer
from spd.runtime.round.limits import ZERO_PAGE
from tests.helpers import (
    Tiny,
    assert_same_runs,
    count_drafted,
    get_local_queue,
    make_engine,
    random_prompts,
    run_all,
    write_altered_drafter,
)
from tests.recipes.tiny_block import write_tiny_block, write_tiny_block_pair
from tests.recipes.tiny_dense import write_dense
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.runtime.block_reference import PlainBlock, PublishedBlock, PublishedSpeculator
from tests.runtime.test_runtime_mtp import VOCAB, compare_drafts, generate_texts

DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "outer_keys": {"nested": False, "taps": (2, 0, 1), "block_size": 4},
    "sliding": {"kinds": "fs", "window": 7},
    "sliding_both_ways": {"kinds": "sf", "window": 7, "is_causal": False},
    "causal": {"kinds": "sf", "window": 9, "is_causal": True},
    "biases": {"bias": True, "layers": 3, "block_size": 8},
    "scales": {"embedding_scale": 4.0, "multiplier": 0.5, "softcap": 3.0},
    "dflash2": {"selector_top_k": 5},
    "dflash2_sliding": {
        "selector_top_k": 7,
        "conv_kernel_size": 3,
        "conv_group_size": 8,
        "kinds": "sf",
        "window": 9,
        "is_causal": False,
        "nested": False,
        "bias": True,
        "softcap": 3.0,
    },
}
SPECULATORS: dict[str, dict[str, Any]] = {
    "all_ids": {"kinds": "fs", "window": 7, "taps": (-1, 1)},
    "few_ids": {"draft_vocab": 96, "kinds": "sf", "window": 7, "sees_block": True},
    "from_anchor": {"draft_vocab": 96, "from_anchor": True, "block_size": 4},
    "vanilla": {"markov": "vanilla", "draft_vocab": 96},
    "gated": {"markov": "gated", "from_anchor": False, "confidence": False},
    "rnn": {"markov": "rnn", "kinds": "fs", "window": 9},
    "dflash2": {"selector_top_k": 5, "kinds": "sf", "window": 7},
    "dflash2_from_anchor": {"selector_top_k": 4, "from_anchor": True, "conv_kernel_size": 4},
    "rnn_few_ids": {"markov": "rnn", "from_anchor": False, "draft_vocab": 80},
}
DRAFTERS |= {
    f"speculators_{name}": {"dialect": "speculators", **options}
    for name, options in SPECULATORS.items()
}
KERNELS = ("torch", "auto")


@pytest.mark.covers(1, count=4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_the_reference_s(tmp_path: Path, name: str, kernels: str) -> None:
    target = tmp_path / "target"
    drafter = write_tiny_block_pair(target, tmp_path / "drafter", **DRAFTERS[name])
    engine = make_engine(target, spec="block", draft_model=drafter, kernels=kernels)
    runs = generate_texts(engine, 24)
    wrong, num_compared, rejected = compare_drafts(PlainBlock(target, drafter), runs, 6)
    assert wrong == 0, (wrong, num_compared)
    assert rejected > 5 and num_compared > 12


@pytest.mark.oracle
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_those_of_the_published_code(tmp_path: Path, name: str) -> None:
    """Step by step at temperature 0, and whole texts where the package has a loop of its own."""
    is_speculators = "dialect" in DRAFTERS[name]
    pytest.importorskip("speculators" if is_speculators else "dflash")
    target = tmp_path / "target"
    drafter = write_tiny_block_pair(target, tmp_path / "drafter", **DRAFTERS[name])
    engine = make_engine(target, spec="block", draft_model=drafter, kernels="auto")
    runs = generate_texts(engine, 40)
    published = (PublishedSpeculator if is_speculators else PublishedBlock)(target, drafter)
    wrong, num_compared, rejected = compare_drafts(published, runs)
    assert wrong == 0, (wrong, num_compared)
    assert rejected > 20 and num_compared > 40
    for prompt, run in () if is_speculators else runs[:2]:
        assert published.generate(prompt, 40) == run.tokens


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda t: t.pop("fc.weight"), "'fc.weight': is missing"),
    (lambda t: t.pop("layers.0.self_attn.k_norm.weight"), "k_norm.weight': is missing"),
    (lambda t: t.update({"hidden_norm.weight": torch.ones(32)}), "'hidden_norm.weight'.*32"),
    (
        lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(96, 65)}),
        "'layers.1.mlp.up_proj.weight'.*65",
    ),
    (
        lambda t: t.update({"layers.1.self_attn.g_proj.weight": torch.ones(6, 64)}),
        "g_proj.weight: this kind of DFlash drafter is not supported",
    ),
    (
        lambda t: t.update({"candidate_selector.x": torch.ones(2)}),
        "candidate_selector.x: this kind",
    ),
    (lambda t: t.update({"lm_head.weight": torch.ones(8, 64)}), "'lm_head.weight'.*8"),
]


DFLASH2_CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda t: t.pop("candidate_selector.successor_codebook"),
        "'candidate_selector.successor_codebook': is missing",
    ),
    (
        lambda t: t.update({"candidate_selector.predecessor_codebook": torch.ones(320, 8)}),
        "predecessor_codebook'.*8",
    ),
    (lambda t: t.pop("layers.1.mlp_conv.base_kernel"), "'layers.1.mlp_conv.base_kernel': is miss"),
    (
        lambda t: t.update({"layers.0.attention_conv.base_kernel": torch.ones(2, 3, 64)}),
        "'layers.0.attention_conv.base_kernel'.*3",
    ),
]


@pytest.mark.parametrize(("change", "words"), DFLASH2_CHANGES)
def test_damaged_dflash2s_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    target = tmp_path / "target"
    drafter = write_tiny_block_pair(target, tmp_path / "drafter", selector_top_k=5)
    folder = write_altered_drafter(drafter, tmp_path / "altered", change)
    with pytest.raises(CheckpointError, match=words):
        make_engine(target, spec="block", draft_model=folder)


DSPARK: dict[str, Any] = {"dialect": "speculators", "markov": "gated", "draft_vocab": 96}
DSPARK_CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda t: t.pop("d2t"), "'d2t': is missing"),
    (lambda t: t["d2t"][3].fill_(-300), "different token ids below 320"),
    (lambda t: t.update(d2t=t["d2t"].flip(0) + 95 - 2 * torch.arange(96)), "not ascending"),
    (lambda t: t.pop("markov_head.gate_proj.bias"), "'markov_head.gate_proj.bias': is missing"),
    (lambda t: t.update({"markov_head.markov_w2.weight": torch.ones(320, 12)}), "markov_w2.*320"),
    (lambda t: t.update({"confidence_head.proj.weight": torch.ones(1, 64)}), "confidence_head.*64"),
    (
        lambda t: t.update({"markov_head.joint_proj.weight": torch.ones(2)}),
        "joint_proj.weight: this kind of DSpark drafter is not supported",
    ),
]


@pytest.mark.parametrize(("change", "words"), DSPARK_CHANGES)
def test_damaged_dsparks_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    target = tmp_path / "target"
    drafter = write_tiny_block_pair(target, tmp_path / "drafter", **DSPARK)
    folder = write_altered_drafter(drafter, tmp_path / "altered", change)
    with pytest.raises(CheckpointError, match=words):
        make_engine(target, spec="block", draft_model=folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return folder / "target", write_tiny_block_pair(folder / "target", folder / "drafter")


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_damaged_drafters_are_refused(
    pair: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    words: str,
) -> None:
    folder = write_altered_drafter(pair[1], tmp_path / "drafter", change)
    with pytest.raises(CheckpointError, match=words) as refusal:
        make_engine(pair[0], spec="block", draft_model=folder)
    assert refusal.value.exit_code == 4


def test_an_embedding_of_the_mask_by_itself_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(pair[1], tmp_path / "drafter")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"mask_embedding\.pt: an embedding of the mask token"
    ):
        make_engine(pair[0], spec="block", draft_model=folder)


def test_a_drafter_of_another_target_is_refused(pair: tuple[Path, Path], tiny: Tiny) -> None:
    with pytest.raises(SpdError, match="DFlash head was made for another model") as refusal:
        make_engine(tiny("qwen3", layers=3), spec="block", draft_model=pair[1])
    assert any("number of layers" in reason for reason in refusal.value.reason)


def test_a_block_has_so_many_drafts(pair: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"spec": "block", "draft_model": pair[1]}
    assert make_engine(pair[0], **options).plan.shape.draft_max == 4
    with pytest.raises(UsageError, match="--draft-max 5: this drafter's block has 4 drafts"):
        make_engine(pair[0], draft_max=5, **options)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_block_has_all_its_rows_whatever_k_is(pair: tuple[Path, Path], k: int) -> None:
    """The first k drafts do not depend on how many are verified."""
    engine = make_engine(pair[0], spec="block", draft_model=pair[1], draft_max=k, kernels="auto")
    runs = generate_texts(engine, 12)
    wrong, num_compared, _ = compare_drafts(PlainBlock(*pair), runs, 6)
    assert wrong == 0 and num_compared > 12


@pytest.mark.parametrize("draft_ctx", [20, 40])
def test_a_drafter_may_end_before_its_target(pair: tuple[Path, Path], draft_ctx: int) -> None:
    """Up to its limit it drafts as ever; then the text goes on without drafts."""
    options: dict[str, Any] = {"spec": "block", "draft_model": pair[1], "draft_ctx": draft_ctx}
    runs = generate_texts(make_engine(pair[0], **options, kernels="auto"), 60)
    plain = generate_texts(make_engine(pair[0], kernels="auto"), 60)
    assert [run.output for _, run in runs] == [run.output for _, run in plain]
    positions = [record.position for _, run in runs for record in run.rounds if record.draft]
    assert positions and max(positions) <= draft_ctx


def test_a_block_has_pages_for_all_of_its_rows(pair: tuple[Path, Path]) -> None:
    """Where pages are few, a block of which one draft is verified writes to no page but its own."""
    options: dict[str, Any] = {"draft_model": pair[1], "draft_max": 1, "cache_pages": 4}
    engine = make_engine(pair[0], spec="block", kernels="auto", **options)
    prompts = [random_prompts(1, length, VOCAB)[0] for length in (50, 51, 52)]
    run_all(engine, prompts, [SamplingParams(max_tokens=13, ignore_eos=True)] * len(prompts))
    proposer = get_local_queue(engine).proposer
    assert isinstance(proposer, BlockProposer)
    for layer in proposer.runner.cache.layers:
        assert not any(pool[ZERO_PAGE].any() for pool in layer.pools)


@pytest.mark.parametrize("family", ["hybrid", "gemma2"])
def test_targets_of_other_families_keep_their_text(tmp_path: Path, family: str) -> None:
    """One has recurrent layers, the other embeddings with a factor and capped logits."""
    target = tmp_path / "target"
    if family == "hybrid":
        write_tiny_hybrid(target)
    else:
        write_dense(target, family, max_positions=1024)
    drafter = write_tiny_block(
        tmp_path / "drafter", target, taps=(0,), kinds="sf", mask_token=7, selector_top_k=4
    )
    prompts = random_prompts(3, 70, 250)
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, seed=1)
        for temperature in (0.0, 0.8, 1.3)
    ]
    options: dict[str, Any] = {"kernels": "auto", "slots": 2}
    plain = run_all(make_engine(target, **options), prompts, params)
    options |= {"spec": "block", "draft_model": drafter, "adaptive": True, "lag": 1}
    drafted = run_all(make_engine(target, **options), prompts, params)
    assert_same_runs(drafted, plain)
    assert count_drafted(drafted)

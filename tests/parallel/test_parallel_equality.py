"""The tokens of one rank on several, for every family, drafter and size of the drafting groups."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spd import demo_folder
from spd.errors import IncompatibleError, UsageError
from spd.formats.checkpoint import Checkpoint
from spd.runtime import EngineConfig, SamplingParams, make_plan
from spd.runtime.load.loader import read_rank_part
from spd.runtime.models import family_layout
from spd.runtime.models.parameters import Shard
from spd.runtime.models.weights import source_tensors
from tests import helpers
from tests.helpers import (
    DampedLayers,
    Run,
    Tiny,
    collect_drafts,
    collect_outputs,
    edit_weights,
    make_fast_engine,
    random_prompts,
)
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny import VARIANTS
from tests.recipes.tiny_block import write_tiny_block
from tests.recipes.tiny_dense import write_dense
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.recipes.tiny_mtp import soft_gain, write_tiny_mtp

pytestmark = pytest.mark.usefixtures("threads")
PROMPTS = [*random_prompts(2, 75, 256), *random_prompts(2, 20, 256, seed=1)]
SHORT = SamplingParams(max_tokens=9, ignore_eos=True)
PARAMS = [replace(SHORT, temperature=t, seed=i) for i, t in enumerate((0.0, 0.8, 0.0, 1.2))]
NGRAM = {"spec": "ngram", "ngram_min": 1, "draft_max": 4}
damped = DampedLayers(full_layers=2)
EVERY_PARAMETER = [
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=14, seed=1),
    SamplingParams(repetition_penalty=1.4, max_tokens=14, logprobs=3),
    SamplingParams(temperature=0.7, logit_bias=((5, 4.0), (6, -100.0)), max_tokens=14, seed=3),
    SamplingParams(min_tokens=8, stop_token_ids=tuple(range(0, 256, 16)), max_tokens=14),
]
BLOCKS: dict[str, dict[str, Any]] = {
    "block": {"kinds": "fs"},
    "block of candidates": {"selector_top_k": 5},
    "block of few ids": {"dialect": "speculators", "markov": "rnn", "draft_vocab": 281},
}
EAGLES: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "copy", "own_embedding": True, "draft_vocab": 281},
    "eagle3 of its own width": {
        "kind": "random",
        "hidden_size": 96,
        "fc_norm": True,
        "norm_output": True,
    },
    "eagle3 without a head": {"kind": "copy", "draft_vocab": None, "hidden_share": 0.3},
    "eagle3 of few ids": {"kind": "random", "draft_vocab": 25},
}  # Heads with the target's embeddings, with others of another width, and with the target's logits.
DEMO: dict[str, Any] = {"model": demo_folder(), "spec": "draft"}


def texts(engine: Any, params: list[SamplingParams] = PARAMS) -> list[Run]:
    runs = helpers.run_all(engine, PROMPTS, params)
    engine.close()
    return runs


def family_folder(name: str, tiny: Tiny, folder: Path) -> Path:
    if name == "fp8":  # heads and widths begin and end inside blocks of 24
        return write_twin(
            tiny("deepseek_v3", hidden=72, dtype="bfloat16"), folder / "fp8", block=24
        )
    return tiny(name) if name in VARIANTS else write_dense(folder / name, name)


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(
    ("name", "ranks"), [("gqa8", 4), ("deepseek_v3", 2), ("gemma2", 2), ("fp8", 4)]
)
def test_a_family_has_the_same_tokens_on_several_ranks(
    name: str, ranks: int, tiny: Tiny, tmp_path: Path
) -> None:
    folder = family_folder(name, tiny, tmp_path)
    speculated = texts(make_fast_engine(folder, slots=2, tp=ranks, **NGRAM))
    assert collect_outputs(speculated) == collect_outputs(texts(make_fast_engine(folder, slots=2)))
    assert helpers.count_drafted(speculated)


@pytest.mark.parametrize("name", [pytest.param("gqa4", marks=pytest.mark.slow), "deepseek_v3"])
def test_int8_rows_have_the_scales_of_whole_rows(name: str, tiny: Tiny) -> None:
    """Each rank rounds its part of a row as one rank rounds the row: the text is the same."""
    folder = tiny(name)
    options = {"slots": 2, "quantize": "int8"}
    plain = collect_outputs(texts(make_fast_engine(folder, **options)))
    assert collect_outputs(texts(make_fast_engine(folder, tp=4, **options))) == plain
    short = {**options, "tp": 2, "dtype": "bfloat16"}
    plain_texts, drafted_texts = (
        collect_outputs(texts(make_fast_engine(folder, **short, **spec))) for spec in ({}, NGRAM)
    )
    assert plain_texts == drafted_texts


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(
    ("method", "ranks"),
    [
        *((method, 2) for method in ("draft", "draft+ngram", "mtp", *BLOCKS, *EAGLES)),
        *(pytest.param(method, 4, marks=pytest.mark.slow) for method in ("eagle3", "draft", "mtp")),
    ],
)
def test_a_drafter_on_fewer_ranks_drafts_the_same(
    method: str, ranks: int, tiny: Tiny, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "spec": method.split()[0],
        "draft_max": 3,
        "slots": 2,
        "ngram_min": 2,
    }
    if method in EAGLES:
        target = tmp_path / "target"
        shape = {"layers": 3, "kv_heads": 4}
        head_options = {"aux": (1, 2, 3), "target_options": shape, **EAGLES[method]}
        options["draft_model"] = write_tiny_pair(target, tmp_path / "head", **head_options)
        if method.endswith("without a head"):  # it shares what makes logits of the target's states
            edit_weights(options["draft_model"], lambda tensors: tensors.pop("lm_head.weight"))
    elif method in BLOCKS:
        target = tiny("qwen3", layers=4, kv_heads=4)
        options["draft_model"] = write_tiny_block(tmp_path / "drafter", target, **BLOCKS[method])
    elif method.startswith("draft"):
        target = tiny("qwen3", layers=4, residual_gain=damped, seed=3)
        options["draft_model"] = tiny("qwen3", layers=2, residual_gain=damped, seed=3)
    else:
        target = write_tiny_mtp(
            tmp_path / "mtp", modules=2, kind="copy", layers=3, residual_gain=soft_gain
        )
    plain = collect_outputs(texts(make_fast_engine(target, slots=2)))
    alone = texts(make_fast_engine(target, **options))
    assert collect_outputs(alone) == plain
    is_random = method in BLOCKS or EAGLES.get(method, {}).get("kind") == "random"
    assert is_random or helpers.count_accepted(alone)
    for group in (1, 2, 4)[: ranks // 2 + 1]:
        runs = texts(make_fast_engine(target, tp=ranks, draft_tp=group, **options))
        assert (collect_outputs(runs), collect_drafts(runs)) == (plain, collect_drafts(alone)), (
            group
        )


def test_every_sampling_parameter_holds_across_ranks(tiny: Tiny) -> None:
    """Draw from full logits, alongside a neighbour whose draw does not need them."""
    folder = tiny("gqa4")
    undivided = texts(make_fast_engine(folder, slots=2), EVERY_PARAMETER)
    parts = texts(
        make_fast_engine(folder, slots=2, tp=2, spec="ngram", draft_max=3), EVERY_PARAMETER
    )
    assert collect_outputs(parts) == collect_outputs(undivided)
    for part_run, full_run in zip(parts, undivided, strict=True):
        assert part_run.logprobs == pytest.approx(full_run.logprobs, abs=1e-4)


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow)])
def test_the_other_rules_hold_across_ranks(rule: str, tiny: Tiny) -> None:
    target = tiny("qwen3", layers=4, residual_gain=damped, seed=3)
    options = {"spec": "draft", "draft_model": target, "draft_max": 3, "verify": rule}
    undivided = texts(make_fast_engine(target, **options))
    assert collect_outputs(
        texts(make_fast_engine(target, tp=2, draft_tp=1, **options))
    ) == collect_outputs(undivided)


def test_ties_go_to_the_lowest_id_across_ranks(tiny: Tiny, tmp_path: Path) -> None:
    """In a head each of whose rows has a twin in another rank's part."""
    folder = tmp_path / "twins"
    half = VARIANTS["llama2"].get("vocab", 320) // 2
    shutil.copytree(tiny("llama2"), folder)
    edit_weights(folder, lambda t: t["lm_head.weight"][half:].copy_(t["lm_head.weight"][:half]))
    on_one_rank, on_two_ranks = (texts(make_fast_engine(folder, tp=ranks)) for ranks in (1, 2))
    assert collect_outputs(on_one_rank) == collect_outputs(on_two_ranks)
    assert all(token < half for run in on_two_ranks[::2] for token in run.tokens), (
        "greedy takes the first of twins"
    )


def test_parts_make_the_whole_and_nothing_is_read_twice(tiny: Tiny, tmp_path: Path) -> None:
    """The parts of four ranks, concatenated, are the tensor; two ranks share key heads."""
    for name in ("gqa4", "deepseek_v3", "phi3"):
        folder = family_folder(name, tiny, tmp_path)
        config = helpers.read_model_config(folder)
        layout = family_layout(config)
        with Checkpoint.open(folder) as checkpoint:
            ranks = [source_tensors(config, layout.sharded(Shard(rank, 4))) for rank in range(4)]
            cuts = [{name: part.cut for name, part in parts.items() if part.cut} for parts in ranks]
            assert all(cut.keys() == cuts[0].keys() for cut in cuts) and len(cuts[0]) > 8
            for tensor in cuts[0]:
                full_tensor = checkpoint.read(tensor)
                parts = [read_rank_part(checkpoint, tensor, cut[tensor]) for cut in cuts]
                dim = cuts[0][tensor].dim
                copies = 2 if "k_proj" in tensor or "v_proj" in tensor else 1
                size = sum(part.shape[dim] for part in parts)
                parts = parts[::copies]
                if "qkv_proj" not in tensor:
                    assert size == copies * full_tensor.shape[dim], tensor
                if len(cuts[0][tensor].ranges) == 1:
                    assert torch.equal(torch.cat(parts, dim), full_tensor), tensor


@pytest.mark.parametrize(
    ("tp", "draft_tp", "options", "message", "fix"),
    [
        (3, None, {}, "--tp 3 does not divide the target", "--tp 2"),
        (8, None, {}, "--tp 8 does not divide", "--tp 4"),
        (4, 3, {}, "--draft-tp must divide --tp", "--draft-tp 1"),
        (2, 2, {}, "a drafter, and here no model drafts", "leave --draft-tp out"),
        (2, 2, DEMO, "--draft-tp 2 does not divide the drafter", "--draft-tp 1"),
    ],
)
def test_unsuitable_numbers_of_ranks_are_refused(
    tp: int, draft_tp: Any, options: Any, message: str, fix: str, tiny: Tiny
) -> None:
    with pytest.raises(IncompatibleError if "not divide" in message else UsageError) as caught:
        make_fast_engine(
            **{"model": tiny("qwen3"), "spec": "auto", "tp": tp, "draft_tp": draft_tp, **options}
        )
    assert message in caught.value.message and fix in caught.value.fix


def test_a_head_is_divided_as_its_target_and_a_draft_model_is_not(tmp_path: Path) -> None:
    headed = write_tiny_mtp(tmp_path / "mtp", layers=3)
    for options, ranks in (
        ({"spec": "mtp"}, 2),
        ({"draft_model": headed}, 1),
        ({"spec": "ngram"}, 1),
    ):
        plan = make_plan(EngineConfig(model=headed, tp=2, **options))
        assert plan.shape.draft_tp == ranks, options

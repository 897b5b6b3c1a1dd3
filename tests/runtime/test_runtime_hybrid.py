"""Hybrids of recurrent and attention layers: the model and its drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spd.errors import CheckpointError
from spd.formats import checkpoint
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.kernels.native.build import unavailable_reason
from spd.runtime import SamplingParams
from tests import helpers
from tests.helpers import (
    make_engine,
    random_prompts,
    run_all,
)
from tests.recipes.tiny_eagle3 import write_tiny_eagle3
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.runtime.eagle3_reference import LibraryTarget, PlainEagle3
from tests.runtime.mtp_reference import LibraryMtp
from tests.runtime.test_runtime_mtp import compare_drafts

PROMPTS = [*random_prompts(3, 20, 256), *random_prompts(1, 75, 256, seed=1), (5,), (7, 9)]
FORMS: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32", "kernels": "torch"},
    "native": {"dtype": "bfloat16", "kernels": "native"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "three value heads a key head": {},
    "odd": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "tie_word_embeddings": True,
    },
    "attention first": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", *["linear_attention"] * 2],
    },
}
Shelf = Callable[..., Path]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Return a function that writes tiny hybrids."""
    return lambda **options: write_tiny_hybrid(
        tmp_path_factory.mktemp("hybrid") / "model", **options
    )


needs_native = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no C kernels here: {unavailable_reason()}"
)
NATIVE_FIRST = [
    pytest.param("native", marks=needs_native),
    pytest.param("torch", marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize("wrapped", [False, True], ids=["text", "wrapped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_greedy_text_are_those_of_transformers(
    hybrid: Shelf, tmp_path: Path, shape: str, wrapped: bool, kernels: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder = hybrid(**SHAPES[shape])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    assert ModelFolder(tmp_path).config == ModelFolder(folder).config
    engine = make_engine(hybrid(**SHAPES[shape], wrapped=wrapped), dtype="float32", kernels=kernels)
    # Both sum chunks in different orders.
    helpers.assert_matches_transformers(
        model, engine, random_prompts(1, 90, 256, seed=4)[0], 24, tolerance=5e-4
    )


SPARSE_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def pack_experts(tensors: dict[str, torch.Tensor]) -> None:
    """Store the experts of each layer in two tensors, as the published checkpoints do."""
    for stem in {
        name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name
    }:
        for packed, parts in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            expert_parts = [
                [tensors.pop(f"{stem}{e}.{part}.weight") for part in parts] for e in range(8)
            ]
            tensors[f"{stem}{packed}"] = torch.stack([torch.cat(expert) for expert in expert_parts])


def write_sparse(folder: Path, name: str, **sizes: int) -> Any:
    """Write a hybrid with experts by the library; return the model; sizes: others than usual."""
    import transformers

    config_class = f"{name}TextConfig" if name == "Qwen3_5Moe" else f"{name}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, config_class)(**SPARSE_SIZES | sizes)
    ).eval()
    for parameter_name, tensor in model.named_parameters():
        is_vector = parameter_name.endswith(("A_log", "dt_bias")) or "norm" in parameter_name
        torch.nn.init.normal_(tensor.data, std=0.3 if is_vector else 0.12)
    model.save_pretrained(folder)
    return model


@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1)
@pytest.mark.parametrize("stored", ["by expert", "packed"])
@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_sparse_hybrids_equal_transformers(tmp_path: Path, name: str, stored: str) -> None:
    """The two generations store projections differently."""
    model = write_sparse(tmp_path, name)
    if stored == "packed":
        helpers.edit_weights(tmp_path, pack_experts)
    helpers.assert_matches_transformers(
        model, make_engine(tmp_path, kernels="torch"), random_prompts(1, 70, 300, seed=4)[0], 24
    )


def test_too_many_packed_experts_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small header may state any number: experts are counted before anything is allocated."""
    save_file(
        {"model.layers.0.mlp.experts.down_proj": torch.zeros(9, 2, 2)},
        tmp_path / "model.safetensors",
    )
    assert len(Checkpoint.open(tmp_path).tensors) == 9
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 8)
    with pytest.raises(CheckpointError, match="holds more than 8 tensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("k", "kernels"),
    [(4, "auto"), *(pytest.param(k, "torch", marks=pytest.mark.slow) for k in (1, 2))],
)
def test_drafts_of_its_mtp_layer_are_the_reference_s(
    hybrid: Shelf, tmp_path: Path, k: int, kernels: str
) -> None:
    total = 0
    for agreeing in (True,) if k < 4 else (False, True):
        folder = hybrid(mtp=True, agreeing=agreeing)
        prompts = random_prompts(2, 20, 256)
        params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
        runs = run_all(
            make_engine(folder, kernels=kernels, spec="mtp", draft_max=k), prompts, params
        )
        plain = LibraryMtp(folder, "mtp", 1, tmp_path / f"{agreeing}")
        wrong, num_compared, _ = compare_drafts(
            plain, list(zip(prompts, runs, strict=True)), max_rounds=6
        )
        assert wrong == 0
        total += num_compared
    assert total > (6 if k < 4 else 12)


@pytest.mark.parametrize("form", NATIVE_FIRST)
@pytest.mark.parametrize("k", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_drafts_of_an_eagle3_head_are_right(
    hybrid: Shelf, tmp_path: Path, form: str, k: int
) -> None:
    """The head reads streams that enter recurrent and attention layers.

    The text is plain decoding's.
    """
    target = hybrid(num_hidden_layers=7)
    head = write_tiny_eagle3(tmp_path / "head", target, aux=(1, 3, 6))
    options = {"dtype": "float32", "kernels": form, "ctx": 320}
    engine = make_engine(target, **options, spec="eagle3", draft_model=head, draft_max=k)
    prompts = PROMPTS[:: 2 if form == "native" else 4]  # torch's recurrence is slow
    params = [SamplingParams(max_tokens=24 if form == "native" else 10, ignore_eos=True)] * len(
        prompts
    )
    runs = run_all(engine, prompts, params)
    plain = PlainEagle3(target, head, LibraryTarget(target))
    wrong, num_compared, _ = compare_drafts(
        plain, list(zip(prompts, runs, strict=True)), max_rounds=6
    )
    assert wrong == 0 and num_compared >= (12 if form == "native" else 8)
    plain_runs = run_all(make_engine(target, **options), prompts, params)
    assert [run.tokens for run in runs] == [run.tokens for run in plain_runs]


@pytest.mark.parametrize("form", NATIVE_FIRST)
def test_a_model_that_drafts_for_itself_is_always_right(hybrid: Shelf, form: str) -> None:
    """A recurrent draft model catches up and is rolled back: every draft is the target's token."""
    folder = hybrid(dtype=FORMS[form]["dtype"])
    cases: list[dict[str, Any]] = [{"draft_max": 4, "lag": 2, "slots": 4}]
    if form == "native":
        cases += [{"draft_max": 1}, {"draft_max": 3, "adaptive": True}]
    for options in cases:
        engine = make_engine(folder, spec="draft", draft_model=folder, **FORMS[form], **options)
        params = [
            SamplingParams(max_tokens=20, ignore_eos=True, seed=i) for i in range(len(PROMPTS))
        ]
        runs = run_all(engine, PROMPTS, params)
        assert helpers.count_drafted(runs) == sum(run.metrics.draft_n_accepted for run in runs)
        assert helpers.count_drafted(runs) > 50 or "adaptive" in options

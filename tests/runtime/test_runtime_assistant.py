"""Drafts of Gemma 4's assistants against those of `transformers`, over the same target."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.folder import ModelFolder
from spd.runtime import EngineConfig, SamplingParams
from spd.runtime.models.assistant import check_assistant
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.memory import measure_memory
from spd.runtime.plan.plan import resolve_plan
from tests.helpers import edit_config, make_engine, random_prompts, run_all, run_one
from tests.recipes.mtp_folders import write_hollow
from tests.recipes.tiny import write_json
from tests.recipes.tiny_assistant import assistant_shapes, write_assistant
from tests.recipes.tiny_dense import write_dense
from tests.runtime.assistant_reference import LibraryAssistant
from tests.runtime.test_runtime_mtp import compare_drafts

BIASED_IDS = (5, 17, 40)
"""The ids of all texts."""
BIASED = SamplingParams(
    max_tokens=60, ignore_eos=True, logit_bias=tuple((i, 100.0) for i in BIASED_IDS)
)
CARD = Machine("cuda", 120 * 2**30, (8, 9), is_foreseen=True)
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "clusters": {"clusters": 4, "selected": 3}}
Pairs = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """A target, and each kind of assistant for it."""
    shelf = tmp_path_factory.mktemp("assistants")
    target = write_dense(shelf / "target", "gemma4")
    return {
        kind: (target, write_assistant(shelf / kind, target, **options))
        for kind, options in KINDS.items()
    }


@pytest.mark.covers(1, count=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3))])
def test_drafts_are_the_library_s(pairs: Pairs, kind: str, k: int) -> None:
    """Biases limit target and assistant to few ids, so that some drafts are accepted."""
    target, folder = pairs[kind]
    engine = make_engine(target, spec="assistant", draft_model=folder, draft_max=k, slots=2)
    prompts = [*random_prompts(2, 20, 320), *random_prompts(1, 75, 320, seed=1), (3, 9)]
    runs = list(zip(prompts, run_all(engine, prompts, [BIASED] * len(prompts)), strict=True))
    plain = LibraryAssistant(target, folder, dict.fromkeys(BIASED_IDS, 100.0))
    wrong, num_compared, rejected = compare_drafts(plain, runs, max_rounds=12)
    assert wrong == 0, (wrong, num_compared)
    accepted = [record.accepted for _, run in runs for record in run.rounds]
    assert rejected > 8 and num_compared > 10 and max(accepted) == k and sum(accepted) > 10


def test_auto_takes_the_assistant_in_the_models_folder(pairs: Pairs, tmp_path: Path) -> None:
    target = tmp_path / "it"
    folder = tmp_path / "it-assistant"
    target.symlink_to(pairs["clusters"][0])
    shutil.copytree(pairs["clusters"][1], folder)
    drafter = make_engine(target, spec="auto").plan.drafter
    assert (drafter.method, drafter.reason) == (
        "assistant",
        "the model's own assistant, it-assistant",
    )
    assert make_engine(pairs["plain"][0], spec="auto").plan.drafter.method == "ngram"
    edit_config(folder, lambda config: config.update(architectures=["DFlashDraftModel"]))
    drafter = make_engine(target, spec="auto").plan.drafter
    assert drafter.method == "ngram" and "it-assistant cannot be used" in drafter.reason


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "type": ({"model_type": "gemma4"}, {}, "model_type"),
    "no text": ({"text_config": None}, {}, "text_config: is missing"),
    "untied": ({"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
    "clusters": ({"num_centroids": 7}, {}, "num_centroids: 7 does not divide"),
    "more kept": ({"centroid_intermediate_top_k": 5}, {}, "centroid_intermediate_top_k"),
    "own caches": ({}, {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    "experts": ({}, {"enable_moe_block": True}, "enable_moe_block"),
    "narrow": ({"backbone_hidden_size": 32}, {}, "hidden size: head 32, target 64"),
    "heads": ({}, {"head_dim": 8}, "head size: head 8"),
    "missing": ({"num_centroids": 8}, {}, "centroids"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_model_s_assistant_is_refused(pairs: Pairs, tmp_path: Path, case: str) -> None:
    target, folder = pairs["clusters"]
    outer, text, words = WRONG[case]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, lambda config: (config["text_config"].update(text), config.update(outer)))
    with pytest.raises((CheckpointError, IncompatibleError)) as refusal:
        make_engine(target, spec="auto", draft_model=tmp_path)
    assert words in "\n".join([refusal.value.message, *refusal.value.reason])


def test_an_assistant_is_no_model(pairs: Pairs) -> None:
    target, folder = pairs["plain"]
    with pytest.raises(CheckpointError, match="an assistant drafts for another model"):
        make_engine(folder)
    for spec, words in (
        ("draft", "is an assistant, not a model"),
        ("eagle3", "not an EAGLE-3 head"),
    ):
        with pytest.raises(IncompatibleError, match=words):
            make_engine(target, spec=spec, draft_model=folder)
    with pytest.raises(IncompatibleError, match="is a model, not an assistant"):
        make_engine(target, spec="assistant", draft_model=target)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("kind", KINDS)
def test_suppressed_ids_are_not_drafted(pairs: Pairs, tmp_path: Path, kind: str) -> None:
    target, folder = pairs[kind]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [5, 17]})
    free, suppressed = (
        run_one(
            target, random_prompts(1, 20, 320)[0], BIASED, spec="assistant", draft_model=drafter
        )
        for drafter in (folder, tmp_path)
    )
    free_drafts, suppressed_drafts = (
        {i for record in run.rounds for i in record.draft} for run in (free, suppressed)
    )
    assert free_drafts & {5, 17} and not suppressed_drafts & {5, 17} and suppressed_drafts


ROTARY_PARAMETERS = {
    "full_attention": {
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
        "rope_type": "proportional",
    },
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
E2B: dict[str, Any] = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "dtype": "bfloat16",
    "global_head_dim": 512,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
    "num_experts": None,
    "top_k_experts": None,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "rope_parameters": ROTARY_PARAMETERS,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "vocab_size": 262144,
}
"""The common keys of google/gemma-4-E2B-it and its assistant."""
E2B_TARGET = {
    **E2B,
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_kv_shared_layers": 20,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "use_double_wide_mlp": True,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
}
TEXT = {
    **E2B,
    "architectures": None,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
E2B_ASSISTANT = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 1536,
    "centroid_intermediate_top_k": 32,
    "num_centroids": 2048,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "use_ordered_embeddings": True,
    "text_config": TEXT,
}
"""The config.json of google/gemma-4-E2B-it-assistant."""
E4B = {
    **E2B_TARGET,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "use_double_wide_mlp": False,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
}
E4B_TEXT = {**TEXT, "num_key_value_heads": 2}
E4B_ASSISTANT = {**E2B_ASSISTANT, "backbone_hidden_size": 2560, "text_config": E4B_TEXT}
NOTED_SHAPES = {
    "pre_projection.weight": (256, 3072),
    "post_projection.weight": (1536, 256),
    "model.embed_tokens.weight": (262144, 256),
    "masked_embedding.centroids.weight": (2048, 256),
    "masked_embedding.token_ordering": (262144,),
}
"""Shapes in its header, as public readers noted them."""
WIDE = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262144}


def make_large_configs(
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int, int],
    unified: bool = False,
    **text: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of a larger release and of its assistant.

    heads: of queries, of keys, and of keys of full attention.
    """
    name, kind = ("Gemma4Unified", "gemma4_unified") if unified else ("Gemma4", "gemma4")
    keys = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
    shared_text = {
        **E2B,
        **WIDE,
        **dict(zip(keys, heads, strict=True)),
        "model_type": f"{kind}_text",
    }
    shared_text["hidden_size_per_layer_input"] = 0
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    target = {
        **shared_text,
        **sizes,
        **text,
        "layer_types": kinds * (layers // 6),
        "num_kv_shared_layers": 0,
    }
    assistant_text = {
        **shared_text,
        "hidden_size": 1024,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
    }
    assistant_text |= {"num_kv_shared_layers": 4, "layer_types": TEXT["layer_types"]}
    assistant = {
        **E2B_ASSISTANT,
        "architectures": [f"{name}AssistantForCausalLM"],
        "text_config": assistant_text,
    }
    assistant |= {"model_type": f"{kind}_assistant", "backbone_hidden_size": hidden}
    target_config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "text_config": target,
        "model_type": kind,
    }
    return target_config, {**assistant, "use_ordered_embeddings": False}


EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
PUBLISHED = {
    "E2B": (E2B_TARGET, E2B_ASSISTANT, NOTED_SHAPES, 78e6),
    "E4B": (
        E4B,
        E4B_ASSISTANT,
        {name: NOTED_SHAPES[name] for name in NOTED_SHAPES if "masked" in name},
        78e6,
    ),
    "12B": (*make_large_configs(3840, 15360, 48, (16, 8, 1), unified=True), {}, 0.4e9),
    "26B-A4B": (*make_large_configs(2816, 2112, 30, (16, 8, 2), **EXPERTS), {}, 0.4e9),
    "31B": (*make_large_configs(5376, 21504, 60, (32, 16, 4)), {}, 0.45e9),
}
"""Configurations of google/gemma-4-*-it, of their assistants, shapes that are noted, and elements.

The larger ones' are those that tests of public loaders (of MLX in Swift, of other servers) were
written with against the releases. Tensor names are the library's.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_assistant_is_planned_for(tmp_path: Path, name: str) -> None:
    target_config, config, noted_shapes, size = PUBLISHED[name]
    target = tmp_path / "it"
    folder = tmp_path / "it-assistant"
    shapes = {**assistant_shapes(config), **noted_shapes}
    for path, written_config in ((target, target_config), (folder, config)):
        path.mkdir()
        write_json(path / "config.json", written_config)
    dtypes = {name: "I64" if "ordering" in name else "BF16" for name in shapes}
    write_hollow(
        folder / "model.safetensors", [(name, dtypes[name], shapes[name]) for name in shapes]
    )
    head = ModelFolder(folder)
    assert check_assistant(head.config, head.checkpoint) == []
    elements = sum(math.prod(shape) for name, shape in shapes.items() if dtypes[name] == "BF16")
    assert elements == pytest.approx(size, rel=0.1), "the size in its name"
    plan = resolve_plan(EngineConfig(model=target, spec="assistant"), CARD)
    assert plan.drafter.reason == "the model's own assistant, it-assistant"
    need = measure_memory(plan.shape)
    assert plan.shape.draft.head_kind == "assistant" and need.draft_cache == 0
    assert need.draft_weights == pytest.approx(2 * elements, rel=0.02)

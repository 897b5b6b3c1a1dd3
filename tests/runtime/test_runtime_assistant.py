"""Drafts of Gemma 4's assistants against `transformers`' own, over the same target, whatever was accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError, IncompatibleError
from spd.runtime import SamplingParams
from tests.helpers import make_engine, random_prompts, run_all
from tests.recipes.tiny import write_json
from tests.recipes.tiny_assistant import write_assistant
from tests.recipes.tiny_dense import write_dense
from tests.runtime.assistant_reference import LibraryAssistant
from tests.runtime.test_runtime_mtp import compared

FEW = (5, 17, 40)
"""Ids that texts are made of."""
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "clusters": {"clusters": 4, "kept": 3}}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """A target, and each kind of assistant for it."""
    shelf = tmp_path_factory.mktemp("assistants")
    target = write_dense(shelf / "target", "gemma4")
    return {kind: (target, write_assistant(shelf / kind, target, **given)) for kind, given in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4])
def test_drafts_are_the_library_s(pairs: dict[str, tuple[Path, Path]], kind: str, k: int) -> None:
    """Of few ids, which target and assistant are held to by their biases, some drafts are accepted."""
    target, folder = pairs[kind]
    engine = make_engine(target, spec="assistant", draft_model=folder, draft_max=k, slots=2)
    prompts = [*random_prompts(2, 20, 320), *random_prompts(1, 75, 320, seed=1), (3, 9)]
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=tuple((i, 100.0) for i in FEW))
    runs = list(zip(prompts, run_all(engine, prompts, [params] * len(prompts)), strict=True))
    wrong, seen, rejected = compared(LibraryAssistant(target, folder, dict.fromkeys(FEW, 100.0)), runs)
    assert wrong == 0, (wrong, seen)
    accepted = [record.accepted for _, run in runs for record in run.rounds]
    assert rejected > 20 and seen > 40 and max(accepted) == k and sum(accepted) > 10


def test_auto_takes_the_assistant_beside_a_model(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    for name, kind in (("it", "target"), ("it-assistant", "clusters")):
        (tmp_path / name).symlink_to(pairs["clusters"][kind == "clusters"])
    plan = make_engine(tmp_path / "it", spec="auto").plan
    assert plan.drafter.method == "assistant" and plan.drafter.reason == "the model's own assistant"
    assert make_engine(pairs["plain"][0], spec="auto").plan.drafter.method == "ngram"
    config = json.loads((tmp_path / "it-assistant/config.json").read_text())
    (tmp_path / "it-assistant").unlink()
    (tmp_path / "it-assistant").mkdir()
    write_json(tmp_path / "it-assistant/config.json", {**config, "architectures": ["DFlashDraftModel"]})
    plan = make_engine(tmp_path / "it", spec="auto").plan
    assert plan.drafter.method == "ngram" and "it-assistant cannot be used" in plan.drafter.reason


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
def test_another_model_s_assistant_is_refused(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, case: str
) -> None:
    target, folder = pairs["clusters"]
    outer, text, words = WRONG[case]
    config = json.loads((folder / "config.json").read_text())
    inner = outer.get("text_config", {**config["text_config"], **text})
    write_json(tmp_path / "config.json", {**config, **outer, "text_config": inner})
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises((CheckpointError, IncompatibleError)) as refusal:
        make_engine(target, spec="auto", draft_model=tmp_path)
    assert words in "\n".join([refusal.value.message, *refusal.value.reason])


def test_an_assistant_is_no_model(pairs: dict[str, tuple[Path, Path]]) -> None:
    target, folder = pairs["plain"]
    with pytest.raises(CheckpointError, match="an assistant drafts for another model"):
        make_engine(folder)
    for spec, words in (("draft", "is an assistant, not a model"), ("eagle3", "not an EAGLE-3 head")):
        with pytest.raises(IncompatibleError, match=words):
            make_engine(target, spec=spec, draft_model=folder)
    with pytest.raises(IncompatibleError, match="is a model, not an assistant"):
        make_engine(target, spec="assistant", draft_model=target)


@pytest.mark.parametrize("kind", KINDS)
def test_suppressed_ids_are_not_drafted(
    pairs: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    target, folder = pairs[kind]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [5, 17]})
    params = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias=tuple((i, 100.0) for i in FEW))
    drafted = [set[int](), set[int]()]
    for seen, drafter in zip(drafted, (folder, tmp_path), strict=True):
        engine = make_engine(target, spec="assistant", draft_model=drafter)
        (run,) = run_all(engine, random_prompts(1, 20, 320), [params])
        seen.update(token_id for record in run.rounds for token_id in record.draft)
    assert drafted[0] & {5, 17} and not drafted[1] & {5, 17} and drafted[1]

"""An EAGLE-3 head's files on their way to a running head: orders, copies, damage, and what it counts for."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.errors import CheckpointError
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.plan.plan import make_plan
from tests.helpers import Run, make_engine, random_prompts, read_model_config, run_all
from tests.recipes.tiny_eagle3 import write_tiny_pair

Tensors = dict[str, torch.Tensor]
PROMPTS = random_prompts(3, 20, 256)
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.8, 1.2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return folder / "target", write_tiny_pair(folder / "target", folder / "head", kind="copy")


def altered(head: Path, place: Path, change: Callable[[Tensors], object], **config: Any) -> Path:
    """A copy of a head with other tensors or another configuration."""
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    place.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, place / "model.safetensors")
    read = json.loads((head / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**read, **config}))
    return place


def drafted(pair: tuple[Path, Path], head: Path | None = None, **wishes: Any) -> list[Run]:
    engine: Engine = make_engine(pair[0], spec="eagle3", draft_model=head or pair[1], draft_max=3, **wishes)
    return run_all(engine, PROMPTS, PARAMS)


def story(runs: list[Run]) -> list[Any]:
    return [(run.output, run.drafts) for run in runs]


def test_ids_in_any_order_and_in_any_integers(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Rows of the head shuffled with their ids are the same head."""

    def shuffled(tensors: Tensors) -> None:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
        tensors["d2t"] = (ids[order] - torch.arange(len(ids))).int()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    head = altered(pair[1], tmp_path / "head", shuffled)
    assert story(drafted(pair, head)) == story(drafted(pair))


def test_other_ids_for_the_rows_of_the_target_s_own_table(pair: tuple[Path, Path], tmp_path: Path) -> None:
    size = read_model_config(pair[0]).vocab_size

    def nameless(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors["d2t"] = torch.arange(size).flip(0) - torch.arange(size)

    head = altered(pair[1], tmp_path / "head", nameless, draft_vocab_size=None)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        make_engine(pair[0], spec="eagle3", draft_model=head, draft_max=3)


def test_a_copy_of_the_target_s_embeddings_is_not_kept_twice(pair: tuple[Path, Path], tmp_path: Path) -> None:
    theirs = load_file(pair[0] / "model.safetensors")["model.embed_tokens.weight"]
    heads = {
        name: altered(
            pair[1], tmp_path / name, lambda t, table=table: t.update({"embed_tokens.weight": table})
        )
        for name, table in (("same", theirs), ("other", -theirs))
    }
    engines = {
        name: make_engine(pair[0], spec="eagle3", draft_model=head, draft_max=3)
        for name, head in heads.items()
    }
    for name, engine in engines.items():
        target, head = engine._device.runner.model, engine._device.proposer.runners[0].model  # type: ignore
        assert (head.embedding is target.embedding) == (name == "same")
    assert story(run_all(engines["same"], PROMPTS, PARAMS)) == story(drafted(pair))
    assert story(run_all(engines["other"], PROMPTS, PARAMS)) != story(drafted(pair))
    plans = {name: engine.plan for name, engine in engines.items()}
    without = make_plan(EngineConfig(model=pair[0], spec="eagle3", draft_model=pair[1], draft_max=3, ctx=256))
    for name in heads:
        held = make_plan(EngineConfig(model=pair[0], draft_model=heads[name], draft_max=3, ctx=256))
        assert held.need.workspace - without.need.workspace == theirs.numel() * 4, plans[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["d2t"][5:7].copy_(torch.tensor([2**62 + 1, -(2**62)])), "d2t"),
        (lambda t: t["d2t"][1].copy_(t["d2t"][0] - 1), "different token ids below 320"),
        (lambda t: t["d2t"][3].fill_(-300), "different token ids below 320"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(10, 64)}), "embed_tokens.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(320, 64).long()}), "embed_tokens.weight"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(64)}),
            "q_norm.weight: this kind of EAGLE-3 head is not supported",
        ),
        (
            lambda t: t.update({"fc_norm.0.weight": torch.ones(64)}),
            "fc_norm.0.weight: this kind of EAGLE-3 head is not supported",
        ),
    ],
)
def test_damage_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: Callable[[Tensors], object], words: str
) -> None:
    head = altered(pair[1], tmp_path / "head", change)
    with pytest.raises(CheckpointError, match=words):
        make_engine(pair[0], spec="eagle3", draft_model=head, draft_max=3)


def test_tensors_that_change_nothing_are_told(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = altered(pair[1], tmp_path / "head", lambda t: t.update(optimizer=torch.zeros(1)))
    with caplog.at_level(logging.WARNING):
        make_engine(pair[0], spec="eagle3", draft_model=head, draft_max=2)
    assert "1 tensors of" in caplog.text and "'optimizer' first" in caplog.text

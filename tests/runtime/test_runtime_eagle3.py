"""EAGLE-3 heads: read in every layout, and drafts against a plain reference, beside several targets."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spd.errors import CheckpointError
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.models.decoder import AuxStates
from spd.runtime.plan.plan import make_plan
from tests.helpers import Run, make_engine, quick_engine, random_prompts, read_model_config, run_all
from tests.recipes.tiny import write_json, write_tensors
from tests.recipes.tiny_eagle3 import write_tiny_pair
from tests.runtime.eagle3_reference import LibraryTarget, PlainEagle3
from tests.runtime.test_runtime_mtp import (
    Fault,
    compared,
    modules_of,
    shifted,
    stale,
    texts,
    turned_by_slots,
    with_fault,
)

SPECULATORS: dict[str, Any] = {"layout": "speculators", "norm_before_residual": None}
"""What is published most: no word about the residual, which is then the normed state."""
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
"""A copy needs a plain first layer of the head's own size, and a target with soft layers."""
SHORT = {
    ("research", 4),
    ("speculators", 2),
    ("input_norm", 3),
    ("vllm", 3),
    ("own_embedding", 1),
    ("wide", 3),
    ("deepseek_v3", 2),
}

Shelf = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """(target, head) by name and kind, written once."""
    shelf = tmp_path_factory.mktemp("pairs")

    def get(name: str, kind: str) -> tuple[Path, Path]:
        target, head = shelf / f"{name}-{kind}", shelf / f"{name}-{kind}-head"
        if not head.exists():
            write_tiny_pair(target, head, kind=kind, **HEADS[name])
        return target, head

    return get


@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(name, k, marks=() if (name, k) in SHORT else pytest.mark.slow)
        for name in HEADS
        for k in (1, 2, 3, 4)
    ],
)
def test_drafts_are_the_reference_s(pairs: Shelf, name: str, k: int) -> None:
    short, kinds = (name, k) in SHORT, ("random",) if name in RANDOM_ONLY else ("copy", "random")
    for kind in kinds[:1] if short else kinds:
        target, head = pairs(name, kind)
        plain = PlainEagle3(target, head, LibraryTarget(target) if name in BY_LIBRARY else None)
        kernels = "torch" if k == 1 else "auto"
        engine = make_engine(target, spec="eagle3", draft_model=head, draft_max=k, kernels=kernels)
        runs = texts(engine, 24 if short else 60)
        wrong, seen, rejected = compared(plain, runs, 6 if short else 1000)
        assert wrong == 0, (kind, wrong, seen)
        assert rejected > (5 if short else 20) and seen > (12 if short else 40)
        if kind == "copy":
            records = [record for _, run in runs for record in run.rounds if record.draft]
            accepted, drafted = (
                sum(n) for n in zip(*((r.accepted, len(r.draft)) for r in records), strict=True)
            )
            assert 0.15 * drafted < accepted < 0.85 * drafted
            assert max(record.accepted for record in records) == k


Config, Tensors = dict[str, Any], dict[str, Tensor]


def halves_swapped(config: Config, tensors: Tensors) -> None:
    for name in ("q", "k", "v"):
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat(weight.chunk(2, 1)[::-1], 1)


def norms_swapped(config: Config, tensors: Tensors) -> None:
    first, second = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[first], tensors[second] = tensors[second], tensors[first]


def parts_reversed(config: Config, tensors: Tensors) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(3, dim=1)[::-1], dim=1).contiguous()


def other_ids(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(len(tensors["t2d"])) < len(tensors["d2t"])


def says(**changes: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, tensors: config.update(changes)


SLIPS: dict[str, Callable[[Config, Tensors], None]] = {
    "attention reads the state where the embedding belongs": halves_swapped,
    "the embedding's norm and the state's are taken for each other": norms_swapped,
    "auxiliary states are one layer late": says(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "use_aux_hidden_state": True}
    ),
    "the last auxiliary state comes first": parts_reversed,
    "the residual is the state after its norm": says(norm_before_residual=True),
    "the state that goes on has passed the final norm": says(norm_output=True),
    "rows turn as fast as the target's": says(rope_theta=10000.0),
    "norms add what the target's add": says(rms_norm_eps=1e-5),
    "the final norm has no weights": lambda _, tensors: tensors.update({"norm.weight": torch.ones(64)}),
    "the smallest ids are said in place of the chosen ones": other_ids,
}


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("slip", SLIPS)
def test_another_convention_is_seen(tmp_path: Path, slip: str) -> None:
    """The engine gets a head whose files say otherwise than those that the reference reads."""
    target, head, other = (tmp_path / name for name in ("target", "head", "other"))
    write_tiny_pair(target, head, aux=(2, 4, 6))
    config, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    plain = PlainEagle3(target, head)
    shutil.copytree(head, other)
    SLIPS[slip](config, tensors)
    write_json(other / "config.json", config)
    write_tensors(other, tensors)
    runs = texts(quick_engine(target, spec="eagle3", draft_model=other, draft_max=3), 16)
    assert compared(plain, runs, most=8)[0] > 0


def offsets_are_ids(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets from draft ids to the target's are taken for the target's ids."""
    for head in modules_of(engine):
        assert head.ids is not None
        head.ids = head.ids - torch.arange(len(head.ids))


def streams_normed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's streams are normed where they are captured."""
    honest = AuxStates.fuse

    def fuse(self: AuxStates, streams: Sequence[Tensor], *rest: Any) -> Tensor:
        return honest(self, [x / x.square().mean(-1, keepdim=True).sqrt() for x in streams], *rest)

    monkeypatch.setattr(AuxStates, "fuse", fuse)


FAULTS = (shifted, turned_by_slots, offsets_are_ids, streams_normed, stale)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen(pairs: Shelf, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    target, head = pairs("speculators", "copy" if fault is stale else "random")
    runs = with_fault(target, fault, monkeypatch, spec="eagle3", draft_model=head)
    assert compared(PlainEagle3(target, head), runs, most=8)[0] > 0


Parts = dict[str, torch.Tensor]
PROMPTS = random_prompts(3, 20, 256)
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=3) for t in (0.0, 0.8, 1.2)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return folder / "target", write_tiny_pair(folder / "target", folder / "head", kind="copy")


def altered(head: Path, place: Path, change: Callable[[Parts], object], **config: Any) -> Path:
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

    def shuffled(tensors: Parts) -> None:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
        tensors["d2t"] = (ids[order] - torch.arange(len(ids))).int()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]

    head = altered(pair[1], tmp_path / "head", shuffled)
    assert story(drafted(pair, head)) == story(drafted(pair))


def test_other_ids_for_the_rows_of_the_target_s_own_table(pair: tuple[Path, Path], tmp_path: Path) -> None:
    size = read_model_config(pair[0]).vocab_size

    def nameless(tensors: Parts) -> None:
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
    pair: tuple[Path, Path], tmp_path: Path, change: Callable[[Parts], object], words: str
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

"""Hybrids of recurrent and attending layers: the model, its drafts, and that speculation changes no token.

Each fault known of other engines is planted once, and seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.errors import CheckpointError
from spd.formats import checkpoint
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.kernels.native.build import obstacle
from spd.kernels.recurrent.short_conv import Segments
from spd.runtime import SamplingParams
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import SlotRows
from tests.helpers import make_engine, outputs, quick_engine, random_prompts, run_all, speaks_as
from tests.recipes.tiny_eagle3 import write_tiny_eagle3
from tests.recipes.tiny_hybrid import write_tiny_hybrid
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.hybrid_reference import PlainHybrid
from tests.runtime.test_runtime_mtp import compared

PROMPTS = [*random_prompts(3, 20, 256), *random_prompts(1, 75, 256, seed=1), (5,), (7, 9)]
TEMPERATURES = (0.0, 1.0)
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
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    },
}
Shelf = Callable[..., Path]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Tiny hybrids, each written once."""
    parent = tmp_path_factory.mktemp("hybrids")

    def get(**options: Any) -> Path:
        folder = parent / str(abs(hash(json.dumps(options, sort_keys=True))))
        return folder if folder.exists() else write_tiny_hybrid(folder, **options)

    return get


def work(count: int) -> tuple[list[tuple[int, ...]], list[SamplingParams]]:
    """Prompts of every length, each temperature among them."""
    cases = [(prompt, t) for prompt in PROMPTS for t in TEMPERATURES][1::4]
    params = [
        SamplingParams(temperature=t, max_tokens=count, seed=i, ignore_eos=True)
        for i, (_, t) in enumerate(cases)
    ]
    return [prompt for prompt, _ in cases], params


# -- the model -------------------------------------------------------------------------------------


needs_native = pytest.mark.skipif(obstacle() is not None, reason=f"no C kernels here: {obstacle()}")


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
    # The chunks of both add up in other orders.
    speaks_as(model, engine, random_prompts(1, 90, 256, seed=4)[0], 24, close=5e-4)


SPARSE = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "vocab_size": 300, "max_position_embeddings": 512},
    **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 48, "eos_token_id": 2, "bos_token_id": 1},
}


def packed(folder: Path) -> None:
    """Store the experts of each layer in two tensors, as the published checkpoints do."""
    tensors = load_file(folder / "model.safetensors")
    of = {name for name in tensors if ".experts." in name}
    kept = {name: tensor for name, tensor in tensors.items() if name not in of}

    def stacked(stem: str, *parts: str) -> torch.Tensor:
        each = range(SPARSE["num_experts"])
        return torch.stack([torch.cat([tensors[f"{stem}{e}.{part}.weight"] for part in parts]) for e in each])

    for stem in {name.split(".experts.")[0] + ".experts." for name in of}:
        kept[f"{stem}gate_up_proj"] = stacked(stem, "gate_proj", "up_proj")
        kept[f"{stem}down_proj"] = stacked(stem, "down_proj")
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def write_sparse(folder: Path, name: str) -> Any:
    """A hybrid with experts, written by the library itself; returns the model."""
    import transformers

    kind = f"{name}TextConfig" if name == "Qwen3_5Moe" else f"{name}Config"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, kind)(**SPARSE)).eval()
    for each, tensor in model.named_parameters():
        alone = each.endswith(("A_log", "dt_bias")) or "norm" in each
        torch.nn.init.normal_(tensor.data, std=0.3 if alone else 0.12)
    model.save_pretrained(folder)
    return model


@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1)
@pytest.mark.parametrize("stored", ["by expert", "packed"])
@pytest.mark.parametrize("name", ["Qwen3_5Moe", "Qwen3Next"])
def test_sparse_hybrids_speak_as_transformers_do(tmp_path: Path, name: str, stored: str) -> None:
    """The two generations store projections in two ways."""
    model = write_sparse(tmp_path, name)
    if stored == "packed":
        packed(tmp_path)
    speaks_as(model, make_engine(tmp_path, kernels="torch"), random_prompts(1, 70, 300, seed=4)[0], 24)


def test_experts_packed_without_number_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small header may pack as many as it says: they are counted before anything is made of them."""
    save_file({"model.layers.0.mlp.experts.down_proj": torch.zeros(9, 2, 2)}, tmp_path / "model.safetensors")
    assert len(Checkpoint.open(tmp_path).tensors) == 9
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 8)
    with pytest.raises(CheckpointError, match="holds more than 8 tensors"):
        Checkpoint.open(tmp_path)


def test_vision_tensors_are_named_as_unused(hybrid: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    make_engine(hybrid(wrapped=True), kernels="torch")
    assert "1 tensors of" in caplog.text and "model.visual.patch_embed.proj.weight" in caplog.text


@pytest.mark.parametrize("mtp", [False, True])
def test_the_plan_counts_what_is_kept_of_slots(hybrid: Shelf, mtp: bool) -> None:
    engine = make_engine(hybrid(mtp=mtp), slots=3, spec="mtp" if mtp else "off", draft_max=4 if mtp else None)
    kept = [pool for layer in engine._device.runner.cache.layers for pool in layer.pools]
    assert sum(pool.nbytes for pool in kept) == engine.plan.need.cache + engine.plan.need.states


# -- drafts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "kernels"), [(4, "auto"), *(pytest.param(k, "torch", marks=pytest.mark.slow) for k in (1, 2))]
)
def test_drafts_of_its_mtp_layer_are_the_reference_s(hybrid: Shelf, k: int, kernels: str) -> None:
    total = 0
    for agreeing in (True,) if k < 4 else (False, True):
        folder = hybrid(mtp=True, agreeing=agreeing)
        prompts = random_prompts(2, 20, 256)
        params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
        runs = run_all(make_engine(folder, kernels=kernels, spec="mtp", draft_max=k), prompts, params)
        wrong, seen, _ = compared(PlainHybrid(folder), list(zip(prompts, runs, strict=True)), most=6)
        assert wrong == 0
        total += seen
    assert total > (6 if k < 4 else 12)


@pytest.mark.parametrize(
    ("form", "k"),
    [
        pytest.param("native", 4, marks=needs_native),
        pytest.param("native", 1, marks=[needs_native, pytest.mark.slow]),
        *(pytest.param("torch", k, marks=pytest.mark.slow) for k in (2, 4)),
    ],
)
def test_drafts_of_an_eagle3_head_are_the_reference_s(
    hybrid: Shelf, tmp_path: Path, form: str, k: int
) -> None:
    """Of a head that reads streams entering recurrent and attending layers; the text is plain decoding's."""
    target = hybrid(num_hidden_layers=7)
    head = write_tiny_eagle3(tmp_path / "head", target, aux=(1, 4, 7))
    wishes = {"dtype": "float32", "kernels": form, "ctx": 320}
    engine = make_engine(target, **wishes, spec="eagle3", draft_model=head, draft_max=k)
    prompts = PROMPTS[:: 2 if form == "native" else 4]  # torch's recurrence is slow
    params = [SamplingParams(max_tokens=24 if form == "native" else 10, ignore_eos=True)] * len(prompts)
    runs = run_all(engine, prompts, params)
    plain = PlainEagle3(target, head, PlainHybrid(target))
    wrong, seen, _ = compared(plain, list(zip(prompts, runs, strict=True)), most=6)
    assert wrong == 0 and seen >= (12 if form == "native" else 8)
    plain_runs = run_all(make_engine(target, **wishes), prompts, params)
    assert [run.tokens for run in runs] == [run.tokens for run in plain_runs]


@pytest.mark.parametrize("form", ["native", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_model_that_drafts_for_itself_is_always_right(hybrid: Shelf, form: str) -> None:
    """A recurrent draft model is brought up and rolled back: every draft is what the target says."""
    if form == "native" and obstacle() is not None:
        pytest.skip("no C kernels here")
    folder = hybrid(dtype=FORMS[form]["dtype"])
    cases: list[tuple[int, dict[str, Any]]] = [(4, {"lag": 2, "slots": 4})]
    if form == "native":
        cases += [(1, {}), (3, {"adaptive": True})]
    for k, wishes in cases:
        engine = make_engine(
            folder, spec="draft", draft_model=folder, draft_max=k, **{**FORMS[form], **wishes}
        )
        params = [SamplingParams(max_tokens=20, ignore_eos=True, seed=i) for i in range(len(PROMPTS))]
        runs = run_all(engine, PROMPTS, params)
        drafted = sum(run.metrics.draft_n for run in runs)
        assert drafted == sum(run.metrics.draft_n_accepted for run in runs)
        assert drafted > 50 or "adaptive" in wishes


# -- faults ----------------------------------------------------------------------------------------


def _another_keep(change: Callable[[Segments], Segments], patch: pytest.MonkeyPatch) -> None:
    windows = SlotRows.windows

    def changed(self: SlotRows, *given: Any, **named: Any) -> SlotRows:
        made = windows(self, *given, **named)
        assert made.segments is not None
        return made._replace(segments=change(made.segments))

    patch.setattr(SlotRows, "windows", changed)


def kept_with_drafts(patch: pytest.MonkeyPatch) -> None:
    """A window's state is written as of its end: rejected drafts stay in it."""

    def whole(segments: Segments) -> Segments:
        table = segments.table.clone()
        table[4] = table[3] + table[2]
        return segments._replace(table=table)

    _another_keep(whole, patch)


def another_slot_s_history(patch: pytest.MonkeyPatch) -> None:
    """Accepted counts, and so all positions, are read in another order of rows."""

    def turned(segments: Segments) -> Segments:
        return segments._replace(table=torch.cat((segments.table[:1].flip(1), segments.table[1:])))

    _another_keep(turned, patch)


def a_former_owner_s_state(patch: pytest.MonkeyPatch) -> None:
    """A slot is taken over with what the request before left in it."""
    patch.setattr(ModelRunner, "admit", lambda *given: None)


def never_applied(patch: pytest.MonkeyPatch) -> None:
    """The position that a state covers moves on, and the state does not: committed tokens are lost."""
    run = ModelRunner._run

    def moved(self: ModelRunner, batch: Any) -> Any:
        states = [layer.pools[1].clone() for layer in self.cache.layers if len(layer.pools) == 5]
        made = run(self, batch)
        if batch.chunk_start is None and batch.segments is not None and batch.width < 16:
            for layer, state in zip((x for x in self.cache.layers if len(x.pools) == 5), states, strict=True):
                layer.pools[1].copy_(state)
        return made

    patch.setattr(ModelRunner, "_run", moved)


def applied_twice(patch: pytest.MonkeyPatch) -> None:
    """The state moves on, and the position that it covers does not."""
    run = ModelRunner._run

    def stood(self: ModelRunner, batch: Any) -> Any:
        before = self.cache.applied.clone()
        made = run(self, batch)
        if batch.segments is not None and batch.width < 16 and batch.chunk_start is None:
            self.cache.applied.copy_(torch.maximum(before, self.cache.applied - 1))
        return made

    patch.setattr(ModelRunner, "_run", stood)


FAULTS = [kept_with_drafts, another_slot_s_history, a_former_owner_s_state, never_applied, applied_twice]


@pytest.fixture(scope="module")
def plain(hybrid: Shelf) -> list[object]:
    """What is said without drafts and faults."""
    return outputs(run_all(quick_engine(hybrid(mtp=True, agreeing=True)), *work(9)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    hybrid: Shelf,
    plain: list[object],
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    try:
        engine = quick_engine(hybrid(mtp=True, agreeing=True), spec="mtp", draft_max=3, slots=2)
        seen = outputs(run_all(engine, *work(9)))  # more texts than slots
    except (AssertionError, RuntimeError):
        return
    assert seen != plain

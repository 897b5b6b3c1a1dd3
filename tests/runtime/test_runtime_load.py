"""Loading: what a checkpoint must hold, what is refused, and that a plan says what was decided."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.runtime import SamplingParams
from spd.runtime.load import loader
from spd.runtime.models.destinations import Cut
from tests.helpers import cut_when_read, edit_config, edit_weights, make_engine, refused_weights, run_one
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny_eagle3 import write_tiny_pair


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy of a variant."""
    shutil.copytree(tiny(getattr(request, "param", "qwen3")), tmp_path / "model")
    return tmp_path / "model"


def test_a_tokenizer_wider_than_the_embedding_is_refused(copied: Path) -> None:
    edit_config(copied, lambda c: c.update(vocab_size=200, eos_token_id=1, bos_token_id=None))
    (copied / "generation_config.json").unlink()
    both = ("model.embed_tokens.weight", "lm_head.weight")
    said = refused_weights(copied, lambda w: w.update({name: w[name][:200].clone() for name in both}))
    assert "tokenizer.json" in said


def test_padded_rows_of_the_vocabulary_are_never_sampled(copied: Path) -> None:
    """80 rows beyond the tokenizer's 320: their logits are made the largest, and still no text has them."""

    def pad(weights: dict[str, torch.Tensor]) -> None:
        for name, gain in (("model.embed_tokens.weight", 1), ("lm_head.weight", 50)):
            weights[name] = torch.cat((weights[name], weights[name][:80] * gain))

    sampled = [SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for t in (0.0, 0.7, 1.5)]
    before = [run_one(copied, (7, 8, 9), params) for params in sampled]
    edit_weights(copied, pad)
    edit_config(copied, lambda config: config.update(vocab_size=400))
    after = [run_one(copied, (7, 8, 9), params) for params in sampled]
    assert all(max(run.tokens) < 320 for run in after)
    assert [run.output for run in after] == [run.output for run in before]


@pytest.mark.parametrize("copied", ["deepseek_v3"], indirect=True)
def test_an_mtp_head_inside_the_checkpoint_is_fine(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = run_one(copied, (7, 8, 9), SamplingParams(max_tokens=9))
    head = ("layers.3.eh_proj.weight", "layers.3.mlp.experts.0.up_proj.weight_scale_inv", "mtp_layers.0.x")
    edit_weights(copied, lambda w: w.update({f"model.{name}": torch.zeros(2) for name in head}))
    after = run_one(copied, (7, 8, 9), SamplingParams(max_tokens=9))
    assert after.output == before.output and not caplog.messages
    edit_weights(copied, lambda w: w.update({"model.layers.2.eh_proj.weight": torch.zeros(2)}))
    make_engine(copied)
    assert "model.layers.2.eh_proj.weight" in caplog.text, "a layer of the target has no such tensor"


@pytest.mark.parametrize("copied", ["deepseek_v3"], indirect=True)
def test_faults_of_blocks_in_one_message(copied: Path) -> None:
    gone = [
        *("layers.1.mlp.experts.7.down_proj.weight", "layers.2.mlp.gate.e_score_correction_bias"),
        *("layers.2.mlp.shared_experts.gate_proj.weight", "layers.0.self_attn.kv_a_layernorm.weight"),
        "layers.1.self_attn.q_b_proj.weight",
    ]

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for name in gone:
            del weights[f"model.{name}"]
        weights["model.layers.1.self_attn.kv_b_proj.weight"] = torch.zeros(64, 31)

    said = refused_weights(copied, spoil)
    assert "5 missing, 1 of another shape" in said
    assert all(name in said for name in gone) and "shape is [64, 31], expected [128, 32]" in said


@pytest.mark.parametrize("way", ["as stored", "cast", "fp8", "sharded", "rank", "eagle3"])
def test_a_file_that_is_cut_short_while_it_is_read(
    way: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download or a copy that still runs; to touch a map of such a file would end the process."""
    model = victim = tmp_path / "model"
    wishes: dict[str, Any] = {"dtype": "bfloat16"} if way in ("as stored", "sharded", "rank") else {}
    if way == "eagle3":
        victim = write_tiny_pair(model, tmp_path / "head")
        wishes = {"spec": "eagle3", "draft_model": victim, "draft_max": 3}
    elif way == "fp8":
        write_twin(tiny(dtype="bfloat16"), victim, block=16)
    else:
        shutil.copytree(tiny("sharded" if way == "sharded" else "qwen3", dtype="bfloat16"), victim)
    file = max(victim.glob("*.safetensors"))
    cut_when_read(monkeypatch, file)
    with pytest.raises(CheckpointError, match=r"truncated while it was read|changed while in use") as caught:
        if way == "rank":
            with Checkpoint.open(victim) as checkpoint:
                for name in checkpoint.tensors:
                    loader.read_part(checkpoint, name, Cut(0, ((0, 8),)))
        make_engine(model, **wishes)
    assert str(file) in caught.value.message and caught.value.exit_code == 4

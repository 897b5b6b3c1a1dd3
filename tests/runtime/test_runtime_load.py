"""Loading: what a checkpoint must hold, what is refused, and that a plan says what was decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.checkpoint import Checkpoint
from spd.runtime import SamplingParams
from spd.runtime.load import loader
from spd.runtime.models.destinations import Cut
from tests.helpers import (
    cut_when_read,
    edit_config,
    edit_weights,
    make_engine,
    random_prompts,
    refused_weights,
    run_all,
)
from tests.recipes.fp8_twin import write_twin
from tests.recipes.tiny_eagle3 import write_tiny_pair


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny("qwen3"), folder)
    return folder


def test_a_tokenizer_wider_than_the_embedding_is_refused(copied: Path) -> None:
    edit_config(copied, lambda c: c.update(vocab_size=200, eos_token_id=1, bos_token_id=None))
    (copied / "generation_config.json").unlink()
    names = ("model.embed_tokens.weight", "lm_head.weight")
    assert "tokenizer.json" in refused_weights(
        copied, lambda w: w.update({name: w[name][:200].clone() for name in names})
    )


def test_padded_rows_of_the_vocabulary_are_never_sampled(copied: Path) -> None:
    """80 rows beyond the tokenizer's 320: their logits are made the largest, and still no text has them."""

    def pad(weights: dict[str, torch.Tensor]) -> None:
        for name, gain in (("model.embed_tokens.weight", 1), ("lm_head.weight", 50)):
            weights[name] = torch.cat((weights[name], weights[name][:80] * gain))

    prompts = random_prompts(3, 20, 256)
    params = [SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for t in (0.0, 0.7, 1.5)]
    before = run_all(make_engine(copied), prompts, params)
    edit_weights(copied, pad)
    edit_config(copied, lambda config: config.update(vocab_size=400))
    after = run_all(make_engine(copied), prompts, params)
    assert all(max(run.tokens) < 320 for run in after)
    assert [run.output for run in after] == [run.output for run in before]


def test_an_mtp_head_inside_the_checkpoint_is_not_unexpected(
    tiny: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("deepseek_v3"), folder)
    before = run_all(make_engine(folder), random_prompts(1, 9, 256), [SamplingParams(max_tokens=9)])[0]
    head = ("layers.3.eh_proj.weight", "layers.3.mlp.experts.0.up_proj.weight_scale_inv", "mtp_layers.0.x")
    edit_weights(folder, lambda w: w.update({f"model.{name}": torch.zeros(2) for name in head}))
    after = run_all(make_engine(folder), random_prompts(1, 9, 256), [SamplingParams(max_tokens=9)])[0]
    assert after.output == before.output and not caplog.messages
    edit_weights(folder, lambda w: w.update({"model.layers.2.eh_proj.weight": torch.zeros(2)}))
    make_engine(folder)
    assert "model.layers.2.eh_proj.weight" in caplog.text, "a layer of the target has no such tensor"


def test_faults_of_blocks_in_one_message(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("deepseek_v3"), folder)
    gone = [
        "layers.1.mlp.experts.7.down_proj.weight",
        "layers.2.mlp.gate.e_score_correction_bias",
        "layers.2.mlp.shared_experts.gate_proj.weight",
        "layers.0.self_attn.kv_a_layernorm.weight",
        "layers.1.self_attn.q_b_proj.weight",
    ]

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for name in gone:
            del weights[f"model.{name}"]
        weights["model.layers.1.self_attn.kv_b_proj.weight"] = torch.zeros(64, 31)

    said = refused_weights(folder, spoil)
    assert "5 missing, 1 of another shape" in said
    assert all(name in said for name in gone) and "shape is [64, 31], expected [128, 32]" in said


def test_a_draft_with_another_vocabulary_is_refused(tiny: Callable[..., Path], copied: Path) -> None:
    tokenizer = json.loads((copied / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        token: (1 if i == 0 else 0 if i == 1 else i) for token, i in tokenizer["model"]["vocab"].items()
    }
    (copied / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(IncompatibleError) as caught:
        make_engine(tiny("qwen3"), spec="draft", draft_model=copied)
    assert caught.value.code == "vocab_mismatch" and caught.value.fix


@pytest.mark.parametrize("way", ["as stored", "cast", "fp8", "sharded", "rank", "eagle3"])
def test_a_file_that_is_cut_short_while_it_is_read(
    way: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download or a copy that still runs; to touch a map of such a file would end the process."""
    victim, wishes = tmp_path / "model", dict[str, Any]()
    if way == "eagle3":
        victim = write_tiny_pair(tmp_path / "target", tmp_path / "head")
        wishes = {"spec": "eagle3", "draft_model": victim, "draft_max": 3}
    elif way == "fp8":
        write_twin(tiny("qwen3", dtype="bfloat16"), victim, block=16)
    else:
        shutil.copytree(tiny("sharded" if way == "sharded" else "qwen3", dtype="bfloat16"), victim)
        wishes["dtype"] = "float32" if way == "cast" else "bfloat16"
    file = max(victim.glob("*.safetensors"))
    cut_when_read(monkeypatch, file)
    with pytest.raises(CheckpointError, match=r"truncated while it was read|changed while in use") as caught:
        if way == "rank":
            with Checkpoint.open(victim) as checkpoint:
                for name in checkpoint.tensors:
                    loader.read_part(checkpoint, name, Cut(0, ((0, 8),)))
        make_engine(tmp_path / "target" if way == "eagle3" else victim, **wishes)
    assert str(file) in caught.value.message and caught.value.exit_code == 4

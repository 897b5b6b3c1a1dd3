"""Loading: required tensors, refused checkpoints, and equal weights by every reader."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.errors import CheckpointError
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.names import HEAD
from spd.kernels.dispatch import load_kernels
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.layers.linear import FoldedNorm, RowNorm
from spd.runtime.layers.skinny_linear import SkinnyProjection
from spd.runtime.load import loader
from spd.runtime.load.progress import LoadMeter, LoadProgress
from spd.runtime.load.weight_reader import read_tensors
from spd.runtime.models.allocator import ExecutionConfig
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.parameters import Cut
from spd.runtime.plan.memory import tensor_bytes
from tests import helpers
from tests.helpers import (
    edit_config,
    edit_weights,
    make_engine,
    read_model_config,
    read_weights_error,
    run_one,
)
from tests.recipes.packed_twin import write_twin
from tests.recipes.tiny_dense import write_mxfp4
from tests.recipes.tiny_eagle3 import write_tiny_pair


@pytest.fixture
def copied(tiny: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a copy of a variant."""
    shutil.copytree(tiny(getattr(request, "param", "qwen3")), tmp_path / "model")
    return tmp_path / "model"


def test_a_tokenizer_wider_than_the_embedding_is_refused(copied: Path) -> None:
    edit_config(copied, lambda c: c.update(vocab_size=200, eos_token_id=1, bos_token_id=None))
    (copied / "generation_config.json").unlink()
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    message = read_weights_error(
        copied, lambda w: w.update({name: w[name][:200].clone() for name in tables})
    )
    assert "tokenizer.json" in message


def test_padded_rows_of_the_vocabulary_are_never_sampled(copied: Path) -> None:
    """80 rows beyond the tokenizer's 320 get the largest logits, and still no text has them."""
    gains = {"model.embed_tokens.weight": 1, "lm_head.weight": 50}
    sampled = [
        SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for t in (0.0, 0.7, 1.5)
    ]
    before = [run_one(copied, (7, 8, 9), params) for params in sampled]
    edit_weights(
        copied, lambda w: w.update({n: torch.cat((w[n], w[n][:80] * g)) for n, g in gains.items()})
    )
    edit_config(copied, lambda config: config.update(vocab_size=400))
    after = [run_one(copied, (7, 8, 9), params) for params in sampled]
    assert all(max(run.tokens) < 320 for run in after)
    assert [run.output for run in after] == [run.output for run in before]


@pytest.mark.parametrize("copied", ["deepseek_v3"], indirect=True)
def test_an_mtp_head_inside_the_checkpoint_is_fine(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = run_one(copied, (7, 8, 9), SamplingParams(max_tokens=9))
    head = (
        "layers.3.eh_proj.weight",
        "layers.3.mlp.experts.0.up_proj.weight_scale_inv",
        "mtp_layers.0.x",
    )
    edit_weights(copied, lambda w: w.update({f"model.{name}": torch.zeros(2) for name in head}))
    after = run_one(copied, (7, 8, 9), SamplingParams(max_tokens=9))
    assert after.output == before.output and not caplog.messages
    edit_weights(copied, lambda w: w.update({"model.layers.2.eh_proj.weight": torch.zeros(2)}))
    make_engine(copied)
    assert "model.layers.2.eh_proj.weight" in caplog.text, (
        "a layer of the target has no such tensor"
    )


@pytest.mark.parametrize("copied", ["deepseek_v3"], indirect=True)
def test_faults_of_blocks_are_listed_in_one_message(copied: Path) -> None:
    missing = [
        "layers.1.mlp.experts.7.down_proj.weight",
        "layers.2.mlp.gate.e_score_correction_bias",
        "layers.2.mlp.shared_experts.gate_proj.weight",
        "layers.0.self_attn.kv_a_layernorm.weight",
        "layers.1.self_attn.q_b_proj.weight",
    ]
    edit_weights(copied, lambda weights: [weights.pop(f"model.{name}") for name in missing])
    wrong_shape = {"model.layers.1.self_attn.kv_b_proj.weight": torch.zeros(64, 31)}
    message = read_weights_error(copied, lambda weights: weights.update(wrong_shape))
    assert "5 missing, 1 of another shape" in message
    assert (
        all(name in message for name in missing)
        and "shape is [64, 31], expected [128, 32]" in message
    )


@pytest.mark.parametrize("way", ["as stored", "cast", "fp8", "sharded", "rank", "eagle3"])
def test_a_file_that_is_truncated_while_it_is_read_is_refused(
    way: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a download or copy that still runs.

    Access to a memory map of the file would end the process.
    """
    model = victim = tmp_path / "model"
    options: dict[str, Any] = (
        {"dtype": "bfloat16"} if way in ("as stored", "sharded", "rank") else {}
    )
    if way == "eagle3":
        victim = write_tiny_pair(model, tmp_path / "head")
        options = {"spec": "eagle3", "draft_model": victim, "draft_max": 3}
    elif way == "fp8":
        write_twin(tiny(dtype="bfloat16"), victim, block=16)
    else:
        shutil.copytree(tiny("sharded" if way == "sharded" else "qwen3", dtype="bfloat16"), victim)
    file = max(victim.glob("*.safetensors"))
    helpers.truncate_on_open(monkeypatch, file)
    with pytest.raises(
        CheckpointError, match=r"truncated while it was read|changed while in use"
    ) as caught:
        if way == "rank":
            with Checkpoint.open(victim) as checkpoint:
                for name in checkpoint.tensors:
                    loader.read_rank_part(checkpoint, name, Cut(0, ((0, 8),)))
        make_engine(model, **options)
    assert str(file) in caught.value.message and caught.value.exit_code == 4


def test_missing_scales_of_mxfp4_are_named(tmp_path: Path) -> None:
    missing = "model.layers.1.mlp.experts.down_proj_scales"
    message = read_weights_error(write_mxfp4(tmp_path), lambda tensors: tensors.pop(missing))
    assert "layers.1.mlp.experts.0.down_proj.weight_scale" in message


# -- the same weights whichever way they are read -------------------------------------------------------

WAYS = ("direct", "threaded")


def load_tensors(
    folder: Path, way: str, meter: LoadMeter | None = None, fold: bool = False
) -> dict[str, torch.Tensor]:
    """Return a decoder's tensors in float16, which are never packed, by the names of their parts."""
    config = read_model_config(folder)
    meter = meter or LoadMeter()
    with Checkpoint.open(folder) as checkpoint, torch.inference_mode():
        builder = LayerBuilder(
            ExecutionConfig(torch.float16, "cpu", load_kernels("torch"), max_positions=64),
            config.rms_norm_eps,
        )
        builder.fold_norms |= fold
        fill: Any = loader.make_direct_filler(checkpoint, meter, {})
        if way == "threaded":
            fill = partial(read_tensors, checkpoint, advance=meter.advance)
        allocates_first = way == "threaded"
        # Any: the types of the layers' blocks are not known statically.
        model_builder = loader.ModelBuilder(config, builder, allocates_first, meter)
        model: Any = model_builder.build(loader.decoder_part(config), fill)
    tensors = {"embed_tokens": model.embedding, "head": model.head.weight, "norm": model.final_norm}
    for i, layer in enumerate(model.layers):
        attention = layer.attention
        mlp = layer.mlp
        linears = {
            "q+k+v": attention.qkv,
            "o": attention.output,
            "gate+up": mlp.gate_up,
            "down": mlp.down,
        }
        for name, linear in linears.items():
            product = linear.product
            tensors |= {f"{i}.{name}": product.weight, f"{i}.{name}.bias": product.bias}
        for name, projection in {"input_norm": attention.qkv, "post_norm": mlp.gate_up}.items():
            (norm,) = (
                projection.steps_before_chunk
                if isinstance(projection, SkinnyProjection)
                else projection.steps_before
            )
            assert isinstance(norm, FoldedNorm if fold else RowNorm)
            if isinstance(norm, RowNorm):
                tensors[f"{i}.{name}"] = norm.scales
        tensors[f"{i}.qk_norm"] = attention.query_key_step.scales
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    "variant", ["qwen3", "biases", "qwen3_bias", "mlp_bias", "tied", "sharded", "gqa4"]
)
def test_weights_are_the_same_whichever_way_they_are_read(
    variant: str, tiny: Callable[..., Path]
) -> None:
    """Golden tests compare the first way with `transformers`."""
    folder = tiny("llama2", mlp_bias=True) if variant == "mlp_bias" else tiny(variant)
    direct, threaded = (load_tensors(folder, way) for way in WAYS)
    assert direct.keys() == threaded.keys()
    for name, tensor in direct.items():
        assert torch.equal(threaded[name], tensor) and tensor.any(), name


@pytest.mark.parametrize("way", WAYS)
def test_progress_counts_every_byte(way: str, tiny: Callable[..., Path]) -> None:
    folder = tiny("biases")
    reports = list[LoadProgress]()
    total = tensor_bytes(read_model_config(folder), "float16")
    load_tensors(folder, way, LoadMeter(reports.append, total))
    read_reports = [report for report in reports if report.phase == "read"]
    assert all(report.total == total for report in reports)
    assert read_reports[-1].done == total and [r.done for r in read_reports] == sorted(
        r.done for r in read_reports
    )
    packed = [report.done for report in reports if report.phase == "pack"]
    assert packed == sorted(packed) and len(packed) == (2 if way == "threaded" else 0)
    assert not packed or 0 < packed[-1] <= total


def test_the_engine_reports_its_progress(tiny: Callable[..., Path]) -> None:
    reports = list[LoadProgress]()
    model = tiny("tied")
    draft = tiny("tied", layers=1)
    options: dict[str, Any] = {"threads": 1, "dtype": "float32", "ctx": 256, "spec": "draft"}
    Engine(EngineConfig(model=model, draft_model=draft, **options), reports.append)
    assert reports[-1].done == reports[-1].total and reports[0].done < reports[0].total
    assert reports[-1].total == sum(
        tensor_bytes(read_model_config(f), "float32") for f in (model, draft)
    )


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_folded_into_the_matrices_after_them_only(
    way: str, tiny: Callable[..., Path]
) -> None:
    plain = load_tensors(tiny("qwen3"), way)
    folded = load_tensors(tiny("qwen3"), way, fold=True)
    norms = {name for name in plain if name.endswith(("input_norm", "post_norm"))}
    assert norms and folded.keys() == plain.keys() - norms
    for name in folded:
        tensor = plain[name]
        layer, _, part = name.partition(".")
        norm = {"q+k+v": "input_norm", "gate+up": "post_norm"}.get(part)
        expected = (
            tensor if norm is None else (tensor.float() * plain[f"{layer}.{norm}"].float()).half()
        )
        assert torch.equal(folded[name], expected) and torch.equal(expected, tensor) == (
            norm is None
        ), name


@pytest.mark.parametrize("variant", ["tied", "glm4_moe"])
def test_dummy_models_generate_different_texts(
    variant: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    size = {"hidden": 128, "vocab": 2000, "layers": 6} if variant == "tied" else {"vocab": 2000}
    (tmp_path / "config.json").write_bytes((tiny(variant, **size) / "config.json").read_bytes())
    params = [SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)] * 3
    runs = helpers.run_all(
        make_engine(tmp_path, load="dummy"), helpers.random_prompts(3, 20, 2000), params
    )
    for run in runs:
        assert len(run.tokens) == 40 and len(set(run.tokens)) >= 20
        assert all(-9 < logprob < -0.01 for logprob in run.logprobs), "neither uniform nor certain"
    assert len({tuple(run.tokens) for run in runs}) == 3


def test_a_stored_head_counts_more_than_a_tie_flag(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, a head that differs from the embedding is used; a copy is ignored."""
    source = tiny("qwen3")
    folder = shutil.copytree(source, tmp_path / "flagged")
    edit_config(folder, lambda c: c.update(tie_word_embeddings=True))
    assert ModelFolder(folder).config == ModelFolder(source).config
    assert "lm_head.weight is stored and differs" in caplog.text
    caplog.clear()
    edit_weights(folder, lambda t: t.update({HEAD: t["model.embed_tokens.weight"].clone()}))
    assert ModelFolder(folder).config.tie_embeddings and not caplog.text
    edit_weights(folder, lambda t: t.pop(HEAD))
    assert ModelFolder(folder).config.tie_embeddings

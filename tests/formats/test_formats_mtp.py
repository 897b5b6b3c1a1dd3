"""MTP heads are found by their tensors' names, and incomplete ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spd.errors import CheckpointError, IncompatibleError
from spd.formats import mtp
from spd.formats.checkpoint import Checkpoint
from spd.formats.folder import ModelFolder
from spd.formats.json_file import Fields
from spd.formats.model_config import model_config_of
from spd.formats.mtp import MtpSource, read_head_folder
from spd.formats.mtp_layout import MTP_FAMILIES, find_mtp_layout, is_mtp_tensor
from spd.runtime.models.mtp_weights import check_mtp_source, module_layer
from tests.formats.formats_helpers import QWEN3, raises_spd_error, write_json
from tests.helpers import read_model_config

HIDDEN = 8
VOCAB = 32
LAYERS = 2
TARGET = {**QWEN3, "hidden_size": HIDDEN, "vocab_size": VOCAB, "eos_token_id": 2}
LAYER = module_layer(model_config_of(Fields("config.json", TARGET)), MTP_FAMILIES[0]).tensors()
DEEPSEEK = {
    "enorm.weight": (HIDDEN,),
    "hnorm.weight": (HIDDEN,),
    "shared_head.norm.weight": (HIDDEN,),
    "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
}
COPIES = {"embed_tokens.weight": (VOCAB, HIDDEN), "shared_head.head.weight": (VOCAB, HIDDEN)}


def deepseek_shapes(
    first: int = LAYERS, modules: int = 1, *, copies: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a head's modules, numbered from layer `first` on."""
    module_shapes = {**DEEPSEEK, **LAYER, **(COPIES if copies else {})}
    return {
        f"model.layers.{first + m}.{n}": shape
        for m in range(modules)
        for n, shape in module_shapes.items()
    }


def open_checkpoint(folder: Path, shapes: dict, dtype: Any = torch.bfloat16) -> Checkpoint:
    """Write zeros in these shapes, and a final norm; open the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    save_file(
        {"model.norm.weight": torch.ones(HIDDEN, dtype=dtype), **tensors},
        folder / "model.safetensors",
    )
    return Checkpoint.open(folder)


def test_a_head_is_found_by_its_names_whatever_the_configuration_says() -> None:
    names = {"model.norm.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"}
    assert find_mtp_layout("DeepseekV3ForCausalLM", names, LAYERS) is None
    head = find_mtp_layout(
        "DeepseekV3ForCausalLM", names | set(deepseek_shapes(copies=True)), LAYERS
    )
    assert head is not None and (head.family.name, head.modules) == (
        "deepseek",
        1,
    )
    assert head.description == "deepseek layout, 1 module at model.layers.2.*"
    for architecture, name, normed in (
        ("Glm4MoeForCausalLM", "glm4", False),
        ("AnotherForCausalLM", "deepseek", True),
    ):
        other = find_mtp_layout(architecture, set(deepseek_shapes(modules=3)), LAYERS)
        assert other is not None and (other.family.name, other.modules) == (name, 3)
        assert other.family.feeds_back_normed is normed
    for family in MTP_FAMILIES:
        architecture = family.architectures[0] if family.architectures else "X"
        layer = LAYERS if family.continues_layer_numbers else 0
        names = {
            family.module_tensors["projection"].format(i=0, l=layer),
            f"{family.layer_prefix}x".format(i=1, l=layer + 1),
        }
        head = find_mtp_layout(architecture, names, LAYERS)
        assert head is not None and head.family is family and head.modules == 2, family.name


def test_tensors_of_a_head_are_known_by_their_names() -> None:
    for name in (
        "layers.61.enorm",
        "layers.62.mlp.down_proj",
        "mtp_layers.0.input_proj",
        "mtp_emb_norm.0",
    ):
        assert is_mtp_tensor(f"model.{name}.weight", 61), name
    assert is_mtp_tensor("mtp.fc.weight", 61) and is_mtp_tensor(
        "model.mtp.layers.0.enorm.weight", 61
    )
    for name in ("model.layers.60.mlp.down_proj", "model.norm", "model.embed_tokens", "lm_head"):
        assert not is_mtp_tensor(f"{name}.weight", 61), name


def test_a_complete_head_passes_and_every_fault_is_named(tmp_path: Path) -> None:
    shapes = deepseek_shapes(modules=2, copies=True)
    layout = find_mtp_layout("DeepseekV3ForCausalLM", set(shapes), LAYERS)
    assert layout is not None
    target = read_head_folder(ModelFolder(write_head(tmp_path / "target"))).config
    source = MtpSource(ModelFolder(tmp_path), layout, target)
    with open_checkpoint(tmp_path / "whole", shapes) as checkpoint:
        assert set(check_mtp_source(source, checkpoint)) == set(shapes)
    scaled = {**shapes, "model.layers.2.mlp.down_proj.weight_scale_inv": (1, 1)}
    with open_checkpoint(tmp_path / "scaled", scaled) as checkpoint:
        assert set(check_mtp_source(source, checkpoint)) == set(shapes)
    for name in deepseek_shapes(modules=2):
        partial = {key: shape for key, shape in shapes.items() if key != name}
        head = find_mtp_layout("DeepseekV3ForCausalLM", set(partial), LAYERS)
        assert head == layout
        with open_checkpoint(tmp_path / name, partial) as checkpoint:
            with raises_spd_error(
                CheckpointError, "tensors of the MTP head", "1 missing", name
            ) as caught:
                check_mtp_source(source, checkpoint)
            assert (
                "--draft-model HEAD" in caught.value.fix[0] and "convert-mtp" in caught.value.fix[0]
            )
    for extra, shape, words in (
        ("model.layers.3.self_attn.indexer.wk.weight", (4,), "belong to none"),
        ("model.layers.2.enorm.weight", (HIDDEN + 1,), "of another shape"),
    ):
        checkpoint = open_checkpoint(tmp_path / words, {**shapes, extra: shape})
        with checkpoint, raises_spd_error(CheckpointError, words, extra):
            check_mtp_source(source, checkpoint)
    checkpoint = open_checkpoint(tmp_path / "ints", shapes, torch.int8)
    with checkpoint, raises_spd_error(CheckpointError, "unsupported dtype"):
        check_mtp_source(source, checkpoint)


def test_a_lost_head_is_refused_with_the_way_to_attach_one(tmp_path: Path) -> None:
    for config, count in (
        (QWEN3, 0),
        ({**QWEN3, "num_nextn_predict_layers": 1}, 1),
        ({**QWEN3, "text_config": {"mtp_num_hidden_layers": 2}}, 2),
    ):
        write_json(tmp_path, "config.json", config)
        assert mtp.declared_module_count(ModelFolder(tmp_path).fields) == count
    write_json(tmp_path, "config.json", QWEN3)
    config_of_model = replace(ModelFolder(tmp_path).config, num_layers=61)
    refusal = mtp.no_mtp_error(tmp_path, config_of_model, 1)
    assert isinstance(refusal, IncompatibleError) and refusal.exit_code == 4
    assert "model.layers.61.eh_proj.weight" in refusal.reason[0]
    assert "config.json speaks of 1" in refusal.reason[1]
    assert "--draft-model HEAD" in refusal.fix[0]


def write_head(folder: Path, first: int = LAYERS, **changes: Any) -> Path:
    """Write a head folder of one module, numbered from layer `first` on."""
    open_checkpoint(folder, deepseek_shapes(first)).close()
    config = mtp.make_head_config(TARGET, "org/model", "f" * 64, 1, quantized=False)
    write_json(folder, "config.json", {**config, **changes})
    return folder


def test_a_head_folder_is_read_back(tmp_path: Path) -> None:
    head = read_head_folder(ModelFolder(write_head(tmp_path / "head")))
    assert head.layout.family.name == "deepseek" and head.layout.first_layer == LAYERS
    assert (head.verifier, head.verifier_sha256) == ("org/model", "f" * 64)
    assert head.config.hidden_size == HIDDEN
    with raises_spd_error(CheckpointError, "is 1, but 0 modules are there"):
        mtp.read_head_folder(ModelFolder(write_head(tmp_path / "others", first=0)))
    for changes, words in (
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"num_nextn_predict_layers": 3}, "is 3, but 1 modules are there"),
        ({"speculators_config": {}}, "verifier: is missing"),
        ({"transformer_layer_config": None}, "no folder with an MTP head"),
    ):
        with raises_spd_error(CheckpointError, words):
            mtp.read_head_folder(ModelFolder(write_head(tmp_path / "bad", **changes)))


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    head = read_head_folder(ModelFolder(write_head(tmp_path / "head")))
    target = {**QWEN3, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    write_json(tmp_path, "config.json", target)
    mtp.check_head_fits(head, read_model_config(tmp_path), tmp_path)
    write_json(tmp_path, "config.json", {**target, "vocab_size": 2 * VOCAB, "num_hidden_layers": 5})
    with pytest.raises(IncompatibleError) as caught:
        mtp.check_head_fits(head, read_model_config(tmp_path), tmp_path)
    assert caught.value.exit_code == 4
    assert "vocabulary size: head 32, target 64" in caught.value.reason[0]
    assert "layers: head 2, target 5" in caught.value.reason[1]


def test_the_verifier_s_hash_follows_its_final_norm(tmp_path: Path) -> None:
    with (
        open_checkpoint(tmp_path / "a", {"x": (3,)}) as first,
        open_checkpoint(tmp_path / "b", {"y": (5,)}) as second,
    ):
        assert mtp.verifier_hash(first) == mtp.verifier_hash(second)
    with open_checkpoint(tmp_path / "c", {"x": (3,)}, torch.float32) as other_dtype:
        assert mtp.verifier_hash(other_dtype) != mtp.verifier_hash(first)

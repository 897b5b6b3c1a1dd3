"""GGUF files as models: keys, names, tensors that are split or joined, files that are refused."""

from __future__ import annotations

import math
import os
import random
import re
import resource
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from spd.errors import CheckpointError, IncompatibleError, NotFoundError, SpdError
from spd.formats.folder import ModelFolder
from spd.formats.gguf.architectures import ARCHITECTURES, COMMON_KEYS
from spd.formats.gguf.changes import PermutedHeads
from spd.formats.gguf.keys import shortest_decimal
from spd.formats.gguf.model import GgufCheckpoint
from spd.formats.gguf.names import LAYER_NAMES, OUTER_NAMES
from spd.formats.gguf.sidecars import find_sidecar
from spd.formats.gguf.vocabulary import CONTROL
from spd.formats.hub import resolve_model
from spd.formats.model_config import SUPPORTED_ARCHITECTURES
from spd.formats.mtp import find_mtp_source, is_mtp_head, no_mtp_error
from spd.runtime import unused_tensors
from tests.formats.gguf.gguf_helpers import TensorSpec, TypedValue, Value, gguf_bytes, header_bytes
from tests.formats.gguf.test_formats_gguf_container import mutate
from tests.formats.gguf.test_formats_gguf_tokenizer import (
    PIECES,
    byte_level,
    sentence_piece,
)
from tests.recipes.tiny_gguf import tiny_metadata, tiny_tensors, write_tiny_gguf

SMALL = {"hidden": 32, "inner": 64, "heads": 2, "kv_heads": 1, "layers": 1, "vocab": 32}


GLM_KEYS: dict[str, Value] = {
    "block_count": 2,
    "embedding_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}


def write_model(
    tmp_path: Path,
    keys: Mapping[str, Value | None],
    tensors: Mapping[str, TensorSpec | None] | None = None,
) -> ModelFolder:
    """Write a small Llama with other keys and tensors; None removes one."""
    metadata = {**tiny_metadata(**SMALL), **keys}
    all_tensors = {**tiny_tensors("Q8_0", **SMALL), **(tensors or {})}
    path = tmp_path / "a.gguf"
    path.write_bytes(
        gguf_bytes(
            {key: value for key, value in metadata.items() if value is not None},
            {name: tensor for name, tensor in all_tensors.items() if tensor is not None},
        )
    )
    return ModelFolder(path)


def test_keys_become_a_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {})
    config = folder.config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (32, 1, 32)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, 16)
    assert config.rms_norm_eps == 1e-5
    assert config.rope.theta == 10000.0
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)
    assert not config.tie_embeddings
    assert unused_tensors(config, folder.checkpoint) == []


def test_biases_and_tied_embeddings_follow_from_tensors(tmp_path: Path) -> None:
    bias = TensorSpec("F32", [32])
    key_bias = TensorSpec("F32", [16])
    biases = {
        "blk.0.attn_q.bias": bias,
        "blk.0.attn_k.bias": key_bias,
        "blk.0.attn_v.bias": key_bias,
    }
    config = write_model(tmp_path, {}, {**biases, "output.weight": None}).config
    assert config.attention_bias
    assert config.tie_embeddings


def test_a_fused_matrix_is_cut(tmp_path: Path) -> None:
    """The converter's --fuse-qkv writes rows of queries, keys and values behind each other."""
    separate = dict.fromkeys(("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"))
    fused = {**separate, "blk.0.attn_qkv.weight": TensorSpec("Q8_0", [64, 32])}
    folder = write_model(tmp_path, {}, fused)
    checkpoint = folder.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    rows = [
        checkpoint.stored[f"model.layers.0.self_attn.{name}_proj.weight"].parts[0] for name in "qkv"
    ]
    assert [part.shape for part in rows] == [(32, 32), (16, 32), (16, 32)]
    matrices = [checkpoint.stored[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert [matrix.changes for matrix in matrices] == [(PermutedHeads(2),), (PermutedHeads(1),), ()]
    offsets = [part.offset - rows[0].offset for part in rows]
    assert offsets == [0, 32 * 34, 48 * 34]
    assert unused_tensors(folder.config, folder.checkpoint) == []


def test_stacked_experts_are_cut(tmp_path: Path) -> None:
    """Experts follow each other; --fuse-gate-up-exps writes gates before inputs in each."""
    dense = dict.fromkeys(f"blk.0.ffn_{name}.weight" for name in ("gate", "up", "down"))
    routed = {
        **dense,
        "blk.0.ffn_gate_inp.weight": TensorSpec("F32", [3, 32]),
        "blk.0.ffn_gate_up_exps.weight": TensorSpec("Q8_0", [3, 128, 32]),
        "blk.0.ffn_down_exps.weight": TensorSpec("Q8_0", [3, 32, 64]),
    }
    folder = write_model(tmp_path, {"llama.expert_count": 3, "llama.expert_used_count": 2}, routed)
    checkpoint = folder.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    assert folder.config.architecture == "MixtralForCausalLM"
    assert unused_tensors(folder.config, checkpoint) == []
    file_tensors = folder.gguf.file.tensors if folder.gguf else {}
    for name, stem, rows, columns in (
        ("gate_up", "gate", 64, 32),
        ("gate_up", "up", 64, 32),
        ("down", "down", 32, 64),
    ):
        start = file_tensors[f"blk.0.ffn_{name}_exps.weight"].offset
        size = rows * columns // 32 * 34
        for expert in range(3):
            part = checkpoint.stored[f"model.layers.0.mlp.experts.{expert}.{stem}_proj.weight"]
            step = 2 * size if name == "gate_up" else size
            assert part.parts[0].offset == start + expert * step + (stem == "up") * size
            assert (part.shape, part.nbytes) == ((rows, columns), size)


@pytest.mark.parametrize("shape", [[1, 3], [3]])
def test_ernie_s_corrections_are_a_row(tmp_path: Path, shape: list[int]) -> None:
    """The converter writes a row, of which llama-quantize makes a vector."""
    architecture = "ernie4_5-moe"
    keys: dict[str, Value | None] = {
        key.replace("llama.", f"{architecture}."): value
        for key, value in tiny_metadata(**SMALL).items()
    }
    keys |= {"general.architecture": architecture, f"{architecture}.expert_count": 3}
    folder = write_model(tmp_path, keys, {"blk.0.exp_probs_b.bias": TensorSpec("F32", shape)})
    name = "model.layers.0.mlp.moe_statics.e_score_correction_bias"
    assert folder.checkpoint.tensors[name].shape == (1, 3)


MTP_KEYS: dict[str, Value | None] = {
    "general.architecture": "glm4moe",
    "glm4moe.nextn_predict_layers": 1,
    **{f"glm4moe.{key}": value for key, value in GLM_KEYS.items()},
}
MTP_TENSORS = {
    **{f"blk.1.nextn.{name}.weight": TensorSpec("F32", [32]) for name in ("enorm", "hnorm")},
    "blk.1.nextn.eh_proj.weight": TensorSpec("F32", [32, 64]),
    "blk.1.attn_norm.weight": TensorSpec("F32", [32]),
}


def test_a_file_with_an_mtp_head_alone_is_told_from_a_model(tmp_path: Path) -> None:
    model = write_model(tmp_path, MTP_KEYS, MTP_TENSORS)
    assert model.gguf is not None and not is_mtp_head(model)
    without_layers = {name: None for name in model.gguf.file.tensors if name.startswith("blk.0.")}
    assert is_mtp_head(write_model(tmp_path, MTP_KEYS, {**MTP_TENSORS, **without_layers}))
    assert not is_mtp_head(write_model(tmp_path, {}))
    assert not is_mtp_head(write_model(tmp_path, {}, without_layers)), "a vocabulary"


def test_layers_of_an_mtp_head_stand_behind_the_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path, MTP_KEYS, MTP_TENSORS)
    stored = folder.checkpoint.tensors
    assert folder.fields.get("num_hidden_layers") == 1
    names = ("enorm", "hnorm", "eh_proj", "input_layernorm")
    assert {f"model.layers.1.{name}.weight" for name in names} <= stored.keys()
    assert stored["model.layers.1.eh_proj.weight"].shape == (32, 64)


def test_factors_of_angles_are_read(tmp_path: Path) -> None:
    factors = TensorSpec("F32", [8], struct.pack("<8f", *[1.0] * 4, *[8.0] * 4))
    rope = write_model(tmp_path, {}, {"rope_freqs.weight": factors}).config.rope
    assert rope.kind == "longrope"
    assert rope.short_factor == (1.0,) * 4 + (8.0,) * 4


def test_float32_reads_as_the_shortest_decimal_that_means_it() -> None:
    assert shortest_decimal(9.999999747378752e-06) == 1e-5
    assert shortest_decimal(1000000.0) == 1e6
    assert shortest_decimal(0.1) == 0.1
    assert math.isnan(shortest_decimal(math.nan))
    assert shortest_decimal(math.inf) == math.inf


def test_a_file_without_its_ending_is_opened(tmp_path: Path) -> None:
    """Other programs store files under their hashes."""
    path = write_tiny_gguf(tmp_path / "sha256-0123", "Q8_0", **SMALL)
    assert resolve_model(str(path)) == path
    assert ModelFolder(path).config.hidden_size == 32


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no such file"):
        resolve_model(str(tmp_path / "b.gguf"))


def test_a_folder_of_files_says_which_there_are(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "b.gguf", "Q8_0", **SMALL)
    with pytest.raises(CheckpointError, match=r"one of which is to be named: b\.gguf"):
        resolve_model(str(tmp_path))


REFUSED: list[tuple[dict[str, Value | None], dict[str, TensorSpec | None], str]] = [
    ({"general.architecture": "mamba"}, {}, "general.architecture: 'mamba' is not supported"),
    ({"general.architecture": None}, {}, "general.architecture: is missing"),
    ({"general.type": "mmproj"}, {}, "general.type: 'mmproj' is not a model"),
    ({"llama.attention.head_count": 0}, {}, "llama.attention.head_count: 0 is not a whole number"),
    ({"llama.attention.head_count": "x"}, {}, "llama.attention.head_count: 'x' is not"),
    ({"llama.block_count": 1 << 30}, {}, "llama.block_count: 1073741824 is not"),
    ({"llama.context_length": None}, {}, "max_position_embeddings: is missing"),
    ({}, {"token_embd.weight": None}, "tensor 'token_embd.weight': is missing"),
    ({}, {"blk.0.attn_qkv.weight": TensorSpec("F32", [7, 32])}, "7 rows are not 32 \\+ 16 \\+ 16"),
    (
        {},
        {"blk.0.ffn_up_exps.weight": TensorSpec("F32", [32])},
        "shape \\[32\\] does not stack up to 16,384 experts",
    ),
    (
        {},
        {"rope_freqs.weight": TensorSpec("F16", [8])},
        "F16 \\[8\\] is not a list of up to 512 F32",
    ),
    (
        {},
        {"blk.0.attn_qkv.weight": TensorSpec("F32", [64, 32])},
        "tensor 'blk.0.attn_q",
    ),
]


@pytest.mark.parametrize(("keys", "tensors", "message"), REFUSED)
def test_wrong_values_are_refused_by_name(
    tmp_path: Path,
    keys: dict[str, Value | None],
    tensors: dict[str, TensorSpec | None],
    message: str,
) -> None:
    folder = write_model(tmp_path, keys, tensors)
    with pytest.raises(SpdError, match=message) as caught:
        unused_tensors(folder.config, folder.checkpoint)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("gpt-oss", {"ffn_gate_exps": [2, 4, 32], "ffn_up_exps": [2, 8, 32]}),
        ("deepseek2", {"attn_k_b": [2, 4, 32], "attn_v_b": [3, 32, 4]}),
        ("granitehybrid", {"ffn_gate": [4, 32], "ffn_up": [4, 16]}),
        ("qwen3next", {"attn_qkv": [8, 32], "attn_gate": [8]}),
        ("qwen3next", {"attn_qkv": [8, 32], "attn_gate": [8, 32]}),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, shapes: dict[str, list[int]]
) -> None:
    parts = {f"blk.0.{stem}.weight": TensorSpec("F32", shape) for stem, shape in shapes.items()}
    keys = {f"{name}.{key}": value for key, value in GLM_KEYS.items()}
    folder = write_model(tmp_path, {"general.architecture": name, **keys}, parts)
    with pytest.raises(CheckpointError, match=r"does not fit|are not those of"):
        folder.checkpoint  # noqa: B018


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, {}, {"blk.0.attn_q.weight": None})
    with pytest.raises(
        CheckpointError, match=r"1 missing; first: 'model\.layers\.0\.self_attn\.q_proj"
    ):
        unused_tensors(folder.config, folder.checkpoint)


@pytest.mark.parametrize("name", ["v.blk.0.attn_q.weight", "mm.0.weight", "blk.7.attn_q.weight"])
def test_tensors_of_images_and_mtp_layers_are_noted(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path, {}, {name: TensorSpec("F32", [4])})
    assert folder.checkpoint.notes == (f"not used: {name!r}",)


@pytest.mark.parametrize("name", ["blk.0.strange.weight", "strange", "blk.0.ffn_up_shexp.weight"])
def test_tensors_of_another_model_are_refused(tmp_path: Path, name: str) -> None:
    """One architecture's name covers several classes: an unused tensor would be missing."""
    folder = write_model(tmp_path, {}, {name: TensorSpec("F32", [64, 32])})
    with pytest.raises(CheckpointError, match="is not known in "):
        unused_tensors(folder.config, folder.checkpoint)


def test_glm_that_sees_images_is_refused(tmp_path: Path) -> None:
    """Its converter orders the rows of queries and keys in another way."""
    keys = {f"glm4.{key}": value for key, value in GLM_KEYS.items()}
    folder = write_model(
        tmp_path, {"general.architecture": "glm4", **keys, "glm4.rope.dimension_sections": [1, 1]}
    )
    with pytest.raises(CheckpointError, match="sees images is not supported"):
        folder.config  # noqa: B018


def test_experts_without_number_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    tensors = {"token_embd.weight": TensorSpec("F32", [1, 32])}
    with_experts = {**tensors, "blk.0.ffn_up_exps.weight": TensorSpec("F32", [1, 1, 1])}
    head = header_bytes(tiny_metadata(**SMALL), with_experts, 32, 3)
    dimensions = (1).to_bytes(8, "little") * 3
    assert head.count(dimensions) == 1
    head = head.replace(dimensions, dimensions[:16] + (1 << 30).to_bytes(8, "little"))
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(128))
    os.truncate(path, 5 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="does not stack up to 16,384 experts"):
        ModelFolder(path).checkpoint  # noqa: B018
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(
    ("model", "head", "fits"),
    [
        ("Model-9B-Q4_K_M.gguf", "mtp-Model-9B-Q8_0.gguf", True),
        ("Model-9B.Q4_K_M.gguf", "mtp-model-9b-UD-Q4_K_XL.gguf", True),
        ("Model-9B-BF16-00001-of-00002.gguf", "mtp-Model-9B.gguf", True),
        ("Model-9B-Q4_K_M.gguf", "mtp-Model-27B-Q8_0.gguf", False),
        ("Model-9B-Q4_K_M.gguf", "Model-9B-Q8_0.gguf", False),
    ],
)
def test_a_head_s_file_is_found_by_its_name(
    tmp_path: Path, model: str, head: str, fits: bool
) -> None:
    for name in (model, head):
        (tmp_path / name).write_bytes(b"")
    assert find_sidecar(tmp_path / model) == (tmp_path / head if fits else None)


def test_a_head_for_another_model_is_refused(tmp_path: Path) -> None:
    target = ModelFolder(write_tiny_gguf(tmp_path / "a.gguf", "Q8_0", **SMALL))
    head = ModelFolder(write_tiny_gguf(tmp_path / "b.gguf", "Q8_0", **{**SMALL, "layers": 2}))
    with pytest.raises(IncompatibleError, match="was made for another model") as caught:
        find_mtp_source(target, head)
    assert "layers: head 2, target 1" in caught.value.reason
    same = ModelFolder(write_tiny_gguf(tmp_path / "c.gguf", "Q4_0", **SMALL))
    with pytest.raises(IncompatibleError, match=r"holds no MTP layers$"):
        find_mtp_source(target, same)


def test_layers_that_a_converter_left_out_are_told(tmp_path: Path) -> None:
    """Those of DeepSeek V3 are in its checkpoint and in no file."""
    config = ModelFolder(write_tiny_gguf(tmp_path / "a.gguf", "F32", **SMALL)).config
    published = replace(config, architecture="DeepseekV3ForCausalLM")
    error = no_mtp_error(tmp_path / "a.gguf", published, 0)
    assert error.message.endswith("holds no MTP layers, which a converter may have left out")
    assert error.reason == ("no tensor such as blk.1.nextn.eh_proj.weight",)
    assert no_mtp_error(tmp_path, published, 0).message.endswith("holds no MTP layers")


def test_every_architecture_is_of_a_class_that_is_served() -> None:
    for architecture in ARCHITECTURES.values():
        for model in (architecture.model_class, *architecture.variants.values()):
            assert f"{model}ForCausalLM" in SUPPORTED_ARCHITECTURES


def is_refused(path: Path) -> bool:
    """True if a file is refused as a model, in one printable line with its name."""
    folder = ModelFolder(path)
    try:
        unused_tensors(folder.config, folder.checkpoint)
        if folder.tokenizer is not None:
            ids = folder.tokenizer.encode("ab c <|im_end|> é", parse_special=True)
            assert all(0 <= number < folder.tokenizer.vocab_size for number in ids)
        assert folder.generation.eos_token_ids is not None
    except SpdError as error:
        assert error.message.isprintable()
        assert path.name in error.message
        return True
    return False


VOCABULARIES: dict[str, Mapping[str, Value]] = {
    "none": {},
    "bytes": byte_level([("<|im_end|>", CONTROL)], merges=("a b", "ab c"), eos_token_id=256),
    "pieces": sentence_piece(PIECES),
}


@pytest.mark.parametrize("count", [70, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_mutated_models_are_refused_or_opened(tmp_path: Path, vocabulary: str, count: int) -> None:
    draw = random.Random(50)
    sizes = {**SMALL, "vocab": 32 if vocabulary == "none" else 288}
    metadata = {**tiny_metadata(**sizes), **VOCABULARIES[vocabulary]}
    tensors = tiny_tensors("Q8_0", **sizes)
    content = gguf_bytes(metadata, tensors)
    header_length = len(header_bytes(metadata, tensors, 32, 3))
    path = tmp_path / "a.gguf"
    refusals = 0
    for _ in range(count):
        path.write_bytes(mutate(content, draw, header_length))
        refusals += is_refused(path)
    assert refusals > count // 3


def random_value(draw: random.Random) -> Value:
    """Return a value of any type, mostly a small number."""
    numbers: list[Value] = [draw.randrange(1, 9), 32, 64, 2, 0, 1 << 31, 16]
    other_values: list[Value] = [
        TypedValue("f", draw.choice([1e-5, 0.0, math.nan, math.inf, -1.0, 1e30])),
        [draw.randrange(3) for _ in range(draw.randrange(5))],
        (True, False),
        "text",
        TypedValue("q", -1),
        True,
    ]
    return draw.choice(numbers * 3 + other_values)


def random_file(draw: random.Random, name: str) -> bytes:
    """Return a file of an architecture with any of its keys and tensors, of small shapes."""
    architecture = ARCHITECTURES[name]
    metadata: dict[str, Value] = {"general.architecture": name}
    for key in [
        *COMMON_KEYS,
        *architecture.keys,
        "rope.dimension_count",
        "ssm.inner_size",
        "rope.scaling.type",
    ]:
        if draw.random() < 0.9:
            metadata[f"{name}.{key}"] = random_value(draw)
    names = [*OUTER_NAMES, *architecture.outer_names, "rope_freqs"]
    joined = (
        part.rpartition(".")[0]
        for joined_tensor in architecture.joined_tensors
        for part in joined_tensor.parts
    )
    stems = [
        *LAYER_NAMES,
        *architecture.names,
        *joined,
        *(architecture.mtp.outer if architecture.mtp else ()),
    ]
    names += [f"blk.{draw.randrange(3)}.{stem}" for stem in stems]
    tensors: dict[str, TensorSpec] = {"token_embd.weight": TensorSpec("F32", [4, 32])}
    for stem in names:
        shape = [draw.choice([1, 2, 4, 32]) for _ in range(draw.choice([1, 2, 2, 3]))]
        ending = "" if re.search(r"\.(weight|bias|scale)$", stem) else draw.choice([".weight", ""])
        if draw.random() < 0.8:
            tensors.setdefault(f"{stem}{ending}", TensorSpec("F32", shape))
    return gguf_bytes(metadata, tensors)


@pytest.mark.parametrize("count", [6, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_random_files_of_every_architecture_are_refused(
    tmp_path: Path, name: str, count: int
) -> None:
    draw = random.Random(f"{name} {count}")
    path = tmp_path / "a.gguf"
    for _ in range(count):
        path.write_bytes(random_file(draw, name))
        is_refused(path)

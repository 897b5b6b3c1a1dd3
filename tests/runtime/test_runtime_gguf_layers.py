"""Packed weights of GGUF files in layers that read them in a way of their own.

Columns of value heads that the converter moved, tables beside the embedding, and blocks whose result
has no mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.folder import ModelFolder
from spd.formats.gguf.changes import TiledHeads
from spd.formats.gguf.model import GgufModel
from spd.formats.hub import spd_cache_folder
from spd.kernels.dispatch import load_kernels
from spd.runtime.layers.base import ForwardBatch, Residual
from spd.runtime.layers.linear import ResidualProjection, TiledInputProjection, without_mean
from spd.runtime.load.gguf_weights import make_gguf_filler, read_values
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.allocator import BlockTensors, ExecutionConfig, WeightAllocator
from spd.runtime.models.builder import LayerBuilder
from spd.runtime.models.gemma4_mlp import LayerEmbeddings
from spd.runtime.models.gguf_forms import FORMS, find_packed_specs
from spd.runtime.models.parameters import ParameterSpec, Shard
from spd.runtime.models.weight_forms import WIDE, WeightForm
from tests.formats.gguf.gguf_helpers import TensorSpec, write_gguf
from tests.helpers import compute_logits, make_engine, random_prompts
from tests.kernels.forms import needs_compiled
from tests.recipes.tiny_gguf import block_bytes, tiny_metadata, tiny_tensors
from tests.runtime.test_runtime_gguf import write_folder

ROWS = 256
PER_KEY = 2
WIDTH = 128
KEYS = 4
COLUMNS = KEYS * PER_KEY * WIDTH
OUTPUT = "model.layers.0.linear_attn.out_proj.weight"
FORMS_OF_KERNELS = [pytest.param("native", marks=needs_compiled), "triton"]


def make_matrix(kind: str, *shape: int) -> TensorSpec:
    """Return a matrix of random blocks of a type."""
    return TensorSpec(kind, shape, block_bytes(kind, shape, f"{shape}", 0.05))


@pytest.fixture
def hybrid(tmp_path: Path) -> Any:
    """Return a function that writes a hybrid's output matrix of a type, and opens the file."""

    def write(kind: str) -> GgufModel:
        sizes = {"ssm.state_size": 64, "ssm.group_count": KEYS, "ssm.inner_size": COLUMNS}
        metadata: dict[str, Any] = {"general.architecture": "qwen35", "qwen35.block_count": 1}
        metadata |= {f"qwen35.{name}": value for name, value in sizes.items()}
        metadata["qwen35.ssm.time_step_rank"] = KEYS * PER_KEY
        tensors = {
            "token_embd.weight": make_matrix("F32", 8, ROWS),
            "blk.0.ssm_out.weight": make_matrix(kind, ROWS, COLUMNS),
        }
        return GgufModel.open(write_gguf(tmp_path / f"{kind}.gguf", metadata, tensors))

    return write


def make_execution(kernels: str, form: WeightForm) -> ExecutionConfig:
    """Return what a model in float32 on the CPU runs with."""
    loaded = load_kernels(kernels, spd_cache_folder, None, "float32")
    return ExecutionConfig(torch.float32, "cpu", loaded, form)


def load_block(
    model: GgufModel, execution: ExecutionConfig, parameters: dict[str, ParameterSpec], prefix: str
) -> BlockTensors:
    """Allocate a block's tensors and fill them from a file."""
    allocator = WeightAllocator(execution)
    tensors = allocator.allocate_block(parameters, prefix)
    cuts = {
        prefix + source.name: source.cut
        for parameter in parameters.values()
        for source in parameter.sources
        if source.cut is not None
    }
    checkpoint = model.checkpoint
    with checkpoint:
        make_gguf_filler(checkpoint, LoadMeter(), cuts)(allocator.take_views())
    return tensors


def output_parameter(columns: int, shard: Shard | None = None) -> dict[str, ParameterSpec]:
    """Return the parameter of the hybrid's output matrix, or of a rank's columns of it."""
    cut = None if shard is None else shard.columns(columns)
    shapes = {"linear_attn.out_proj.weight": (ROWS, columns)}
    return {"output": ParameterSpec.from_shapes(shapes, cut=cut)}


def make_chunk(rows: int) -> ForwardBatch:
    """Return a prompt's chunk of so many rows, without a cache."""
    numbers = torch.arange(rows)
    return ForwardBatch(
        token_ids=numbers,
        positions=numbers,
        kv_slots=numbers,
        page_table=numbers.view(1, -1),
        plan={},
        num_slots=1,
        width=rows,
        tile=rows,
        chunk_start=0,
    )


def multiply(projection: ResidualProjection, x: Tensor) -> Tensor:
    """Return the product of x, added to a stream of zeros."""
    return projection(x, make_chunk(len(x)), Residual(torch.zeros(len(x), ROWS))).x


@pytest.mark.parametrize("kernels", FORMS_OF_KERNELS)
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_columns_of_moved_heads_stay_packed(hybrid: Any, kind: str, kernels: str) -> None:
    """Blocks of 256 columns hold heads of two keys, so that heads of the input are moved instead."""
    model = hybrid(kind)
    stored = model.checkpoint.stored
    assert stored[OUTPUT].changes == (TiledHeads(KEYS, PER_KEY, WIDTH, dim=1),)
    form = WeightForm("packed", packed=find_packed_specs(stored))
    execution = make_execution(kernels, form)
    tensors = load_block(model, execution, output_parameter(COLUMNS), "model.layers.0.")
    assert tensors["output"].dtype == torch.uint8
    projection = LayerBuilder(execution, 1e-6).output_projection(tensors, "output")
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    with model.checkpoint as checkpoint:
        expected = x.double() @ read_values(checkpoint, OUTPUT).double().T
    assert isinstance(projection, TiledInputProjection)
    torch.testing.assert_close(multiply(projection, x), expected.float(), rtol=1e-4, atol=1e-4)


def test_a_rank_takes_all_moved_heads_of_its_keys(hybrid: Any) -> None:
    model = hybrid("Q4_K")
    form = WeightForm("packed", packed=find_packed_specs(model.checkpoint.stored))
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    total = torch.zeros(3, ROWS)
    for rank in range(2):
        columns = COLUMNS // 2
        execution = make_execution("torch", form)
        parameters = output_parameter(columns, Shard(rank, 2))
        tensors = load_block(model, execution, parameters, "model.layers.0.")
        projection = LayerBuilder(execution, 1e-6).output_projection(tensors, "output")
        total += multiply(projection, x[:, rank * columns : (rank + 1) * columns].contiguous())
    with model.checkpoint as checkpoint:
        expected = x.double() @ read_values(checkpoint, OUTPUT).double().T
    torch.testing.assert_close(total, expected.float(), rtol=1e-4, atol=1e-4)
    four_ranks = output_parameter(COLUMNS // 4, Shard(0, 4))["output"]
    assert form.find_packed_spec(four_ranks, "model.layers.0.") is None  # half a block of 256


@pytest.mark.parametrize("kernels", FORMS_OF_KERNELS)
def test_gemma_4_s_tables_of_layers_are_looked_up_packed(tmp_path: Path, kernels: str) -> None:
    """They are most of the smallest models' bytes."""
    layers = 4
    width = 64
    hidden = 256
    metadata: dict[str, Any] = {"general.architecture": "gemma4", "gemma4.block_count": layers}
    norm = TensorSpec("F32", (width,), block_bytes("F32", (width,), "norm", 1.0))
    tensors = {
        "token_embd.weight": make_matrix("F32", 96, hidden),
        "per_layer_token_embd.weight": make_matrix("Q4_K", 96, layers * width),
        "per_layer_model_proj.weight": make_matrix("Q8_0", layers * width, hidden),
        "per_layer_proj_norm.weight": norm,
    }
    model = GgufModel.open(write_gguf(tmp_path / "a.gguf", metadata, tensors))
    shapes = {
        "embed_tokens_per_layer": (96, layers * width),
        "per_layer_model_projection": (layers * width, hidden),
        "per_layer_projection_norm": (width,),
    }
    parameters = {
        name: ParameterSpec.from_shapes({f"model.{name}.weight": shape})
        for name, shape in shapes.items()
    }
    packed = WeightForm(
        "packed", packed=find_packed_specs(model.checkpoint.stored), packs_tables=True
    )
    ids = torch.tensor([3, 95, 0])
    x = torch.randn(3, hidden, generator=torch.Generator().manual_seed(1))
    results = []
    for form in (WIDE, packed):
        execution = make_execution(kernels, form)
        tables = load_block(model, execution, parameters, "")
        is_packed = tables["embed_tokens_per_layer"].dtype == torch.uint8
        assert is_packed == (form is packed)
        embeddings = LayerEmbeddings(tables, LayerBuilder(execution, 1e-6), layers)
        assert not tables.grouped
        results.append(embeddings(ids, x, make_chunk(3)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@needs_compiled
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_layer_norm_reads_packed_weights(tmp_path: Path, kind: str) -> None:
    """Columns in codes have means, which leave the product instead."""
    metadata = {
        key.replace("llama.", "command-r."): value for key, value in tiny_metadata(layers=2).items()
    }
    metadata |= {"general.architecture": "command-r", "command-r.logit_scale": 0.5}
    tensors = {
        name: tensor
        for name, tensor in tiny_tensors(kind, layers=2).items()
        if not name.endswith("ffn_norm.weight") and name != "output.weight"
    }
    file = write_gguf(tmp_path / "a.gguf", metadata, tensors)
    folder = write_folder(
        file,
        tmp_path / "folder",
        architectures=["CohereForCausalLM"],
        model_type="cohere",
        layer_norm_eps=1e-5,
        logit_scale=0.5,
        tie_word_embeddings=True,
    )
    prompt = random_prompts(1, 40, 300, seed=1)[0]
    engine = make_engine(file, kernels="native", dtype="float32")
    assert engine.plan.weights == FORMS[kind].kind
    assert ModelFolder(file).config.architecture == "CohereForCausalLM"
    expected = compute_logits(make_engine(folder, kernels="torch"), prompt)
    torch.testing.assert_close(compute_logits(engine, prompt), expected, rtol=1e-4, atol=1e-4)


def test_a_mean_does_not_depend_on_other_rows() -> None:
    rows = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    centred = without_mean(rows)
    assert centred.float().mean(-1).abs().max() < 1e-3
    assert all(torch.equal(without_mean(rows[i : i + 1])[0], centred[i]) for i in range(7))


def test_experts_of_two_types_are_planned_as_they_are_allocated() -> None:
    """Kernels of experts read codes of one form: these are multiplied out."""
    shapes = {f"{number}.{part}": (256, 256) for number in range(2) for part in ("gate", "up")}
    specs = {name: FORMS["Q4_K" if name.endswith("gate") else "Q6_K"] for name in shapes}
    form = WeightForm("packed", packed=specs, packs_tables=True, stacks_pieces=True)
    parameter = ParameterSpec.from_shapes(shapes)
    stacked = ParameterSpec(parameter.sources, is_stacked=True)
    assert form.count_bytes(stacked, "", "bfloat16") == 2 * stacked.size
    assert form.count_bytes(parameter, "", "bfloat16") < stacked.size
    tensors = WeightAllocator(make_execution("torch", form)).allocate_block({"a": stacked}, "")
    assert not tensors.grouped
    assert tensors["a"].shape == (1024, 256)

"""GGUF files as models: every type runs as its values do in a folder, with every proposer."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spd.errors import CheckpointError, IncompatibleError
from spd.formats.folder import ModelFolder
from spd.formats.gguf import changes
from spd.formats.gguf.block_types import READABLE_TYPES
from spd.formats.gguf.container import GgufFile
from spd.kernels.native.build import LARGEST_HEAD
from spd.runtime import SamplingParams
from spd.runtime.load import gguf_weights
from spd.runtime.load.gguf_weights import read_values
from spd.runtime.models.gguf_forms import FORMS
from tests.formats.formats_helpers import LLAMA
from tests.helpers import (
    assert_same_runs,
    compute_logits,
    count_drafted,
    make_engine,
    random_prompts,
    run_all,
)
from tests.kernels.forms import needs_compiled
from tests.recipes.tiny import write_json
from tests.recipes.tiny_eagle3 import write_tiny_eagle3
from tests.recipes.tiny_gguf import SIZES, write_tiny_gguf

PARAMS = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 0.9)]


def write_folder(file: Path, folder: Path, **keys: Any) -> Path:
    """Write a file's values as safetensors of float32, and its configuration with these keys."""
    folder.mkdir()
    model = ModelFolder(file)
    with model.checkpoint as opened:
        tensors = {name: read_values(opened, name).contiguous() for name in opened.tensors}
    save_file(tensors, folder / "model.safetensors")
    sizes = {
        "hidden_size": SIZES["hidden"],
        "intermediate_size": SIZES["inner"],
        "num_attention_heads": SIZES["heads"],
        "num_key_value_heads": SIZES["kv_heads"],
        "num_hidden_layers": model.config.num_layers,
        "vocab_size": SIZES["vocab"],
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    write_json(folder / "config.json", {**LLAMA, **sizes, **keys})
    return folder


@pytest.mark.covers(count=12)
@pytest.mark.parametrize("kind", READABLE_TYPES)
def test_a_file_of_each_type_runs_as_its_values(tmp_path: Path, kind: str) -> None:
    file = write_tiny_gguf(tmp_path / "a.gguf", kind)
    folder = write_folder(file, tmp_path / "folder")
    prompt = random_prompts(1, 40, 300, seed=1)[0]
    logits = compute_logits(make_engine(file, kernels="torch"), prompt)
    expected = compute_logits(make_engine(folder, kernels="torch"), prompt)
    assert torch.equal(logits, expected)
    assert 0.1 < logits.std() < 30


@needs_compiled
@pytest.mark.parametrize("kind", FORMS)
def test_packed_types_run_as_their_values(tmp_path: Path, kind: str) -> None:
    """By the C kernels in float32, whose order of sums differs; no matrix is stored dequantized."""
    file = write_tiny_gguf(tmp_path / "a.gguf", kind)
    folder = write_folder(file, tmp_path / "folder")
    prompt = random_prompts(1, 40, 300, seed=1)[0]
    engine = make_engine(file, kernels="native", dtype="float32")
    assert engine.plan.weights == FORMS[kind].kind
    logits = compute_logits(engine, prompt)
    expected = compute_logits(make_engine(folder, kernels="torch"), prompt)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.covers(count=1)
@pytest.mark.parametrize("kind", FORMS)
def test_packed_types_give_the_same_tokens_by_triton(tmp_path: Path, kind: str) -> None:
    """In the interpreter, against torch's values; no matrix is stored dequantized."""
    file = write_tiny_gguf(tmp_path / "a.gguf", kind, layers=1, vocab=96)
    prompts = random_prompts(1, 5, 90, seed=1)
    engine = make_engine(file, kernels="triton", dtype="float32", spec="off")
    assert engine.plan.weights == FORMS[kind].kind
    assert engine.info.plan["weight_bytes"] < 1.05 * file.stat().st_size
    greedy = [SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)]
    runs = run_all(engine, prompts, greedy)
    for kernels in ("torch", "auto"):
        other = make_engine(file, kernels=kernels, dtype="float32", spec="off")
        assert [run.tokens for run in run_all(other, prompts, greedy)] == [
            run.tokens for run in runs
        ]


@pytest.mark.parametrize("kind", ["F16", "Q4_K"])
def test_triton_multiplies_float16_by_wide_weights(tmp_path: Path, kind: str) -> None:
    """Codes could overflow in float16 before the norm's scales.

    In the interpreter, as torch's values in float16.
    """
    file = write_tiny_gguf(tmp_path / "a.gguf", kind, layers=1, vocab=96)
    prompt = random_prompts(1, 4, 90, seed=1)[0]
    engine = make_engine(file, kernels="triton", dtype="float16", spec="off")
    assert engine.plan.weights == "float16"
    expected = compute_logits(make_engine(file, kernels="torch", dtype="float16"), prompt)
    torch.testing.assert_close(compute_logits(engine, prompt), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=needs_compiled), "triton"])
def test_a_file_of_several_types_is_kept_packed(tmp_path: Path, kernels: str) -> None:
    """Values have another type than queries and keys: the three are one matrix of pieces."""
    kinds = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K", "token_embd.weight": "Q8_0"}
    kinds |= {"ffn_up.weight": "Q5_0"} if kernels == "triton" else {}
    file = write_tiny_gguf(tmp_path / "a.gguf", {**kinds, "": "Q4_K"}, layers=1)
    folder = write_folder(file, tmp_path / "folder")
    prompt = random_prompts(1, 40 if kernels == "native" else 3, 300, seed=1)[0]
    engine = make_engine(file, kernels=kernels, dtype="float32", spec="off")
    expected = compute_logits(make_engine(folder, kernels="torch"), prompt)
    torch.testing.assert_close(compute_logits(engine, prompt), expected, rtol=1e-3, atol=1e-3)
    assert engine.info.plan["weight_bytes"] < 1.1 * file.stat().st_size


@pytest.mark.covers(count=4)
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        ("Q4_K", "torch"),
        *(pytest.param(kind, "native", marks=needs_compiled) for kind in FORMS),
    ],
)
def test_speculation_changes_no_token(tmp_path: Path, kind: str, kernels: str) -> None:
    file = write_tiny_gguf(tmp_path / "a.gguf", kind)
    draft = write_tiny_gguf(tmp_path / "b.gguf", "Q4_0", layers=1)
    prompts = random_prompts(2, 20, 300, seed=4)
    options: dict[str, Any] = {"kernels": kernels}
    if kernels == "native":
        options["dtype"] = "bfloat16"
    plain = run_all(make_engine(file, **options), prompts, PARAMS)
    runs = run_all(
        make_engine(file, spec="draft", draft_model=draft, draft_max=4, **options), prompts, PARAMS
    )
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0


def test_a_file_drafts_for_a_file(tmp_path: Path) -> None:
    target = write_tiny_gguf(tmp_path / "a.gguf", "Q4_K")
    draft = write_tiny_gguf(tmp_path / "b.gguf", "Q4_0", layers=1)
    prompts = random_prompts(2, 20, 300, seed=4)
    plain = run_all(make_engine(target), prompts, PARAMS)
    runs = run_all(make_engine(target, draft_model=draft, spec="draft"), prompts, PARAMS)
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0


@needs_compiled
def test_a_file_that_torch_must_run_drafts_for_the_c_kernels(tmp_path: Path) -> None:
    """Its heads are too large for them, and torch's kernels keep nothing packed."""
    target = write_tiny_gguf(tmp_path / "a.gguf", "Q4_K")
    assert LARGEST_HEAD < 768
    large = {"hidden": 768, "heads": 1, "kv_heads": 1, "layers": 1}
    draft = write_tiny_gguf(tmp_path / "b.gguf", "Q4_0", **large)
    prompts = random_prompts(1, 20, 300, seed=4)
    options: dict[str, Any] = {"kernels": "native", "dtype": "bfloat16"}
    engine = make_engine(target, draft_model=draft, spec="draft", **options)
    assert engine.plan.draft_kernels == "torch"
    plain = run_all(make_engine(target, **options), prompts, PARAMS[:1])
    runs = run_all(engine, prompts, PARAMS[:1])
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0


@needs_compiled
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_head_shares_the_embedding_in_few_bits(tmp_path: Path, kind: str) -> None:
    """A head without tables of its own drafts from the codes of the target's embedding."""
    file = write_tiny_gguf(tmp_path / "a.gguf", kind)
    folder = write_folder(file, tmp_path / "folder")
    head = write_tiny_eagle3(tmp_path / "head", folder, layout="speculators", aux=(0, 2))
    prompts = random_prompts(2, 20, 300, seed=4)
    options: dict[str, Any] = {"kernels": "native", "dtype": "bfloat16"}
    plain = run_all(make_engine(file, **options), prompts, PARAMS)
    engine = make_engine(file, spec="eagle3", draft_model=head, draft_max=3, **options)
    runs = run_all(engine, prompts, PARAMS)
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0


def convert(change: changes.Change, original: torch.Tensor) -> list[torch.Tensor]:
    """Apply the converter's change to a tensor, by its description."""
    if isinstance(change, changes.PermutedHeads):
        heads = original.reshape((change.heads, 2, -1, *original.shape[1:]))
        return [torch.stack((heads[:, 0], heads[:, 1]), dim=2).reshape(original.shape)]
    if isinstance(change, changes.ShiftedNorm):
        return [original + 1]
    if isinstance(change, changes.NegatedExp):
        return [-original.exp()]
    if isinstance(change, changes.TiledHeads):
        count = change.keys * change.per_key
        rows = original.movedim(change.dim, 0)
        heads_in_rows = rows[change.first :].reshape((count, change.width, *rows.shape[1:]))
        order = [
            key * change.per_key + i for i in range(change.per_key) for key in range(change.keys)
        ]
        tiled = torch.cat((rows[: change.first], heads_in_rows[order].flatten(0, 1)))
        return [tiled.movedim(0, change.dim)]
    if isinstance(change, changes.Concatenated):
        return [original[:5], original[5:]]
    if isinstance(change, changes.Interleaved):
        moved = original.movedim(change.dim - 1, 0)
        return [moved[start::2].movedim(0, change.dim - 1) for start in range(2)]
    if isinstance(change, changes.LatentHeads):
        heads = original.reshape(3, 6, -1)
        return [heads[:, :2].transpose(1, 2), heads[:, 2:]]
    parts = original.reshape(change.keys, -1, original.shape[1])
    size = change.key_dim
    value_rows = parts.shape[1] - 2 * change.key_dim
    cuts = [*parts.split((size, size, value_rows // 2, value_rows // 2), dim=1)]
    queries, keys, values, gates = (cut.flatten(0, 1) for cut in cuts)
    return [torch.cat((queries, keys, values)), gates]


CHANGES: list[tuple[changes.Change, tuple[int, ...]]] = [
    (changes.PermutedHeads(3), (24, 5)),
    (changes.PermutedHeads(3), (24,)),
    (changes.ShiftedNorm(), (7,)),
    (changes.NegatedExp(), (7,)),
    (changes.TiledHeads(2, 3, 4), (24, 5)),
    (changes.TiledHeads(2, 3, 1), (6,)),
    (changes.TiledHeads(2, 3, 4, first=8), (32, 5)),
    (changes.TiledHeads(2, 3, 4, dim=1), (5, 24)),
    (changes.Concatenated(), (12, 3)),
    (changes.Interleaved(1), (12, 3)),
    (changes.Interleaved(2), (3, 12)),
    (changes.LatentHeads(), (18, 5)),
    (changes.KeyHeadMajor(2, 3), (32, 5)),
]


@pytest.mark.parametrize(("change", "shape"), CHANGES)
def test_changes_of_the_converter_are_undone(
    change: changes.Change, shape: tuple[int, ...]
) -> None:
    original = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    stored = convert(change, original)
    assert not torch.equal(stored[0].flatten(), original.flatten())
    undone = gguf_weights.undo_change(change, stored).reshape(shape)
    assert torch.allclose(undone, original, rtol=0, atol=1e-6)


def test_types_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "a.gguf", "TQ2_0")
    with pytest.raises(CheckpointError, match="dtype TQ2_0 is not supported here"):
        make_engine(file)


def test_a_scale_that_is_no_number_ends_a_text(tmp_path: Path) -> None:
    """The rows whose sums agree are found without it: the text ends where it begins."""
    file = write_tiny_gguf(tmp_path / "a.gguf", "Q8_0", layers=1)
    offset = GgufFile.open(file).tensors["blk.0.ffn_down.weight"].offset
    content = bytearray(file.read_bytes())
    content[offset : offset + 2] = struct.pack("<e", math.nan)
    file.write_bytes(content)
    engine = make_engine(file, kernels="torch", dtype="bfloat16")
    (run,) = run_all(engine, [(1, 2, 3)], PARAMS[:1])
    assert (run.tokens, run.finish_reason) == ([], "error")


def test_weights_in_few_bits_are_not_rounded_again(tmp_path: Path) -> None:
    packed = write_tiny_gguf(tmp_path / "a.gguf", "Q4_K")
    with pytest.raises(IncompatibleError, match=r"the weights of a\.gguf are quantized already"):
        make_engine(packed, quantize="int8")
    make_engine(write_tiny_gguf(tmp_path / "b.gguf", "F16"), quantize="int8")


def test_values_are_rounded_once_to_the_run_s_dtype(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "a.gguf", "Q6_K")
    folder = write_folder(file, tmp_path / "folder")
    prompt = random_prompts(1, 40, 300, seed=1)[0]
    of_file, of_folder = (
        compute_logits(make_engine(path, dtype="bfloat16", kernels="torch"), prompt)
        for path in (file, folder)
    )
    assert torch.equal(of_file, of_folder)


def test_ranges_of_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of few rows give the same values as one strip."""
    file = write_tiny_gguf(tmp_path / "a.gguf", "Q5_K")
    with ModelFolder(file).checkpoint as opened:
        values = read_values(opened, "model.embed_tokens.weight")
        monkeypatch.setattr(gguf_weights, "STRIP_ELEMENTS", 7 * SIZES["hidden"])
        assert torch.equal(read_values(opened, "model.embed_tokens.weight"), values)
        assert torch.equal(read_values(opened, "model.embed_tokens.weight", (5, 9)), values[5:9])

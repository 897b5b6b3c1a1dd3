"""GGUF files of llama.cpp's converter against the folders that they were made of.

LLAMA_CPP=.../vendor/llama.cpp pytest -m "oracle and slow" tests/runtime/test_runtime_gguf_twins.py

Every tensor equals the folder's, and so do the text, the logits and the drafts.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.folder import ModelFolder
from spd.formats.gguf.container import GgufFile
from spd.formats.names import HEAD
from spd.runtime import SamplingParams
from spd.runtime.load.gguf_weights import read_values
from tests.gguf_twins import CONVERTER_OPTIONS, TWINS, convert, llama_cpp
from tests.helpers import collect_drafts, compute_logits, make_engine, random_prompts, run_all
from tests.recipes.tiny_assistant import write_assistant

pytestmark = [pytest.mark.oracle, pytest.mark.slow]
LOG_TOLERANCE = 1e-6
"""The largest error of a logarithm that undoes the converter's exponential."""
LOGIT_TOLERANCE = 1e-4
"""The largest difference of logits: factors of rotary angles are stored in float32."""


@pytest.fixture
def source() -> Path:
    """Return the folder of llama.cpp's source; skip the test without it."""
    folder = llama_cpp()
    if folder is None:
        pytest.skip("LLAMA_CPP does not name a folder of llama.cpp's source")
    return folder


def write_twin(source: Path, tmp_path: Path, name: str) -> tuple[Path, Path]:
    """Write a twin's folder and convert it; return both."""
    folder = TWINS[name](tmp_path / name)
    try:
        file = convert(
            source, folder, tmp_path / f"{name}.gguf", "f32", *CONVERTER_OPTIONS.get(name, ())
        )
    except subprocess.CalledProcessError as error:
        pytest.fail(f"the converter failed: {error.stderr[-500:]}")
    return folder, file


def assert_same_tensors(folder: Path, file: Path) -> None:
    """Assert that a file's tensors are the folder's."""
    folder_model = ModelFolder(folder)
    file_model = ModelFolder(file)
    with folder_model.checkpoint as folder_checkpoint, file_model.checkpoint as file_checkpoint:
        assert [*file_checkpoint.notes] == []
        tied = {HEAD} if folder_model.config.tie_embeddings else set()
        names = folder_checkpoint.tensors.keys() - tied
        if (
            folder_model.config.architecture == "GptOssForCausalLM"
        ):  # whose experts stand another way up
            names = {name for name in names if ".experts." not in name}
        assert names <= file_checkpoint.tensors.keys()
        for name in names:
            expected = folder_checkpoint.read(name).float()
            values = read_values(file_checkpoint, name)
            assert values.shape == expected.shape, name
            assert (values - expected).abs().max() <= LOG_TOLERANCE, name


@pytest.mark.parametrize("name", TWINS)
def test_a_converted_file_is_the_folder(source: Path, tmp_path: Path, name: str) -> None:
    folder, file = write_twin(source, tmp_path, name)
    assert_same_tensors(folder, file)
    prompts = random_prompts(2, 90, 256, seed=len(name))
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * 2
    engines = [make_engine(path, ctx=256) for path in (folder, file)]
    logits = [compute_logits(engine, prompts[0]) for engine in engines]
    assert (logits[0] - logits[1]).abs().max() < LOGIT_TOLERANCE
    texts = [[run.tokens for run in run_all(engine, prompts, params)] for engine in engines]
    assert texts[0] == texts[1]
    if not name.endswith("_mtp"):
        return
    heads = [make_engine(path, ctx=256, spec="mtp", draft_max=3) for path in (folder, file)]
    runs = [run_all(engine, prompts, params) for engine in heads]
    assert [run.tokens for run in runs[1]] == texts[1]
    assert collect_drafts(runs[0]) == collect_drafts(runs[1])
    assert any(accepted for run in collect_drafts(runs[1]) for _, accepted in run)


@pytest.mark.parametrize("name", ["qwen35_mtp", "glm4_moe_mtp", "nemotron_h_latent_mtp"])
def test_a_head_in_a_file_of_its_own_drafts(source: Path, tmp_path: Path, name: str) -> None:
    """A head drafts for the file in its folder, which finds it by its name, and for another folder."""
    folder = TWINS[name](tmp_path / name)
    file = convert(source, folder, tmp_path / "m-F32.gguf", "f32", "--no-mtp")
    head = convert(source, folder, tmp_path / "mtp-m-Q8_0.gguf", "f32", "--mtp")
    prompts = random_prompts(2, 30, 256, seed=len(name))
    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
    options: dict[str, Any] = {"ctx": 256, "draft_max": 3}
    expected = run_all(make_engine(folder, spec="mtp", **options), prompts, params)
    runs_by_source = [
        run_all(make_engine(file, spec="auto", **options), prompts, params),
        run_all(make_engine(file, spec="auto", draft_model=head, **options), prompts, params),
        run_all(make_engine(folder, spec="mtp", draft_model=head, **options), prompts, params),
    ]
    for runs in runs_by_source:
        assert [run.tokens for run in runs] == [run.tokens for run in expected]
        assert collect_drafts(runs) == collect_drafts(expected)


def test_an_assistant_in_a_file_drafts(source: Path, tmp_path: Path) -> None:
    """An assistant drafts for the file in its folder, which finds it by its name, and for another
    folder.
    """
    folder = TWINS["gemma4"](tmp_path / "gemma4")
    assistant = write_assistant(tmp_path / "assistant", folder)
    shutil.copy(folder / "tokenizer.json", assistant)  # whose words the converter counts
    file = convert(source, folder, tmp_path / "gemma-4-F32.gguf")
    head = convert(source, assistant, tmp_path / "mtp-gemma-4-Q8_0.gguf")
    prompts = random_prompts(2, 30, 256, seed=3)
    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 2
    options: dict[str, Any] = {"ctx": 256, "draft_max": 3}
    expected = run_all(
        make_engine(folder, draft_model=assistant, spec="auto", **options), prompts, params
    )
    for engine in (
        make_engine(file, spec="auto", **options),
        make_engine(folder, draft_model=head, spec="auto", **options),
    ):
        runs = run_all(engine, prompts, params)
        assert [run.tokens for run in runs] == [run.tokens for run in expected]
        assert collect_drafts(runs) == collect_drafts(expected)
        assert any(accepted for run in collect_drafts(runs) for accepted, _ in run)


@pytest.mark.parametrize("name", ["llama2", "biases", "qwen2"])
def test_fused_projections_are_the_folder_s(source: Path, tmp_path: Path, name: str) -> None:
    folder = TWINS[name](tmp_path / name)
    file = convert(source, folder, tmp_path / "a.gguf", "f32", "--fuse-qkv")
    assert "blk.0.attn_qkv.weight" in GgufFile.open(file).tensors
    assert_same_tensors(folder, file)


@pytest.mark.parametrize("split_options", [(), ("--no-tensor-first-split",)])
def test_a_split_file_is_the_folder(
    source: Path, tmp_path: Path, split_options: tuple[str, ...]
) -> None:
    folder = TWINS["qwen3"](tmp_path / "qwen3")
    options = ("--split-max-tensors", "6", *split_options)
    convert(source, folder, tmp_path / "a.gguf", "f32", *options)
    parts = sorted(tmp_path.glob("a-*.gguf"))
    assert len(parts) > 3
    assert_same_tensors(folder, parts[2])


def test_files_of_bfloat16_are_the_folder_in_bfloat16(source: Path, tmp_path: Path) -> None:
    folder = TWINS["llama2"](tmp_path / "llama2")
    file = convert(source, folder, tmp_path / "a.gguf", "bf16")
    file_values = read_values(
        ModelFolder(file).checkpoint, "model.layers.0.self_attn.q_proj.weight"
    )
    folder_values = ModelFolder(folder).checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(file_values, folder_values.bfloat16().float())
    assert ModelFolder(file).config.dtype == "bfloat16"

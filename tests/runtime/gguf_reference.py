"""The model of `transformers` on a GGUF file's dequantised weights, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import Prompt

MIN_GAP = 1e-3
"""The distance of the two best logits below which either is right: the order of sums differs."""


def load_reference(file: Path, folder: Path | None = None) -> Any:
    """Return the model of `transformers`; skip the test without the packages that it needs.

    folder: has the configuration, of which `transformers` reads a part only from some files.
    """
    transformers = pytest.importorskip("transformers")
    for name in ("gguf", "accelerate"):
        pytest.importorskip(name)
    options = {} if folder is None else {"config": transformers.AutoConfig.from_pretrained(folder)}
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        quantization_config=transformers.GgufConfig(dequantize=True, gguf_file=file.name),
        dtype=torch.float32,
        **options,
    ).eval()


def reference_logits(reference: Any, ids: Sequence[int]) -> Tensor:
    """Return the logits [T, V] of `transformers`."""
    with torch.inference_mode():
        logits: Tensor = reference(input_ids=torch.tensor([list(ids)])).logits[0]
    return logits


def near_ties(reference: Any, prompt: Prompt, tokens: Sequence[int]) -> list[str]:
    """Return a line for each token of a greedy text that is not the reference's best, but as good.

    Raises AssertionError where one is worse by `MIN_GAP` or more.
    """
    rows = reference_logits(reference, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return near_ties_of(rows, tokens)


def near_ties_of(rows: Tensor, tokens: Sequence[int]) -> list[str]:
    """Return the lines of `near_ties` for the reference's logits [N, V] before each of N tokens."""
    best = rows.max(dim=1)
    chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gaps = best.values - chosen
    assert (gaps < MIN_GAP).all(), f"token {int(gaps.argmax())} is {gaps.max():.1e} below the best"
    others = (best.indices != torch.tensor(tokens)).nonzero().flatten().tolist()
    return [f"token {at} is {gaps[at]:.1e} below the best" for at in others]

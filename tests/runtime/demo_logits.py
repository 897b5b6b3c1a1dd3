"""What the demo says of a text, for tests of what rounding its weights changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.helpers import logits_of, make_engine


def demo_logits(folder: Path, **wishes: Any) -> Tensor:
    """Float32 logits [T, V] of a text by the demo in a folder, each row less its mean."""
    engine = make_engine(folder, ctx=512, **wishes)
    ids = tuple(engine.tokenizer.encode("def total(values):\n    result = 0\n    for value in values:\n"))
    logits = logits_of(engine, ids, 0)
    return logits - logits.mean(-1, keepdim=True)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, in shares of the exact logits' spread."""
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())

"""What the demo says of a text, for tests of what rounding its weights changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spd.runtime.round.limits import NUM_RESERVED
from spd.runtime.round.rows import SlotView
from tests.helpers import make_engine


def demo_logits(folder: Path, **wishes: Any) -> Tensor:
    """Float32 logits [T, V] of a text by the demo in a folder, each row less its mean."""
    engine = make_engine(folder, ctx=512, **wishes)
    ids = tuple(engine.tokenizer.encode("def total(values):\n    result = 0\n    for value in values:\n"))
    view = engine._device.runner
    pages = list(range(NUM_RESERVED, NUM_RESERVED + view.pages_per_block))
    table = view.page_row(pages, len(pages))[None]
    with torch.inference_mode():
        token_ids = torch.tensor([ids])
        rows = view.prompt_rows(token_ids, 0, table)
        hidden = view.forward(rows, table, [SlotView(len(ids), pages)]).hidden
        logits = view.logits(hidden)[0]
    return logits - logits.mean(-1, keepdim=True)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference, in shares of the exact logits' spread."""
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())

"""Latent attention and routed experts in models: a row's bits do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, SlotView
from tests.helpers import make_engine, random_prompts

pytestmark = pytest.mark.usefixtures("every_trial")


LENGTH = 75


def row_hidden(
    runner: ModelRunner, texts: Sequence[Any], starts: Sequence[int], width: int
) -> torch.Tensor:
    """Return hidden states [S, width, hidden] of windows at `starts` of texts whose prefixes are
    cached.
    """
    parts = []
    for i, (text, start) in enumerate(zip(texts, starts, strict=False)):
        view = SlotView(LENGTH + 40, range(2 + 8 * i, 10 + 8 * i))
        parts.append(
            PromptPart(
                slot=i,
                token_ids=torch.tensor([text]),
                begin=start,
                end=start + width,
                view=view,
                chunked=False,
            )
        )
    together = runner._prompt_slot_rows(parts, [None])
    return runner.forward(together.rows, together.page_table, together.views).hidden


@pytest.mark.covers(1)
@pytest.mark.parametrize(
    ("dtype", "kernels"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "auto")]
)
@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v2", "glm4_moe", "qwen3_moe"])
def test_rows_have_equal_bits(
    tiny: Callable[..., Path], variant: str, dtype: str, kernels: str
) -> None:
    """One row, with 0 to 7 other rows before or after it and up to 3 other slots."""
    # Wide enough that products of few rows could take another path: K above 320.
    folder = tiny(variant, hidden=384, intermediate=448, layers=2)
    runner = make_engine(folder, dtype=dtype, kernels=kernels, slots=4).round_queue.runner
    assert runner.buckets is None or runner.buckets[0] <= 16, "else every window has one size"
    texts = random_prompts(4, LENGTH + 20, 256)
    with torch.inference_mode():
        for slot in range(4):
            pages = range(2 + 8 * slot, 10 + 8 * slot)
            ids = torch.tensor([texts[slot]])
            for begin, end in ((0, 64), (64, LENGTH)):
                part = PromptPart(
                    slot=0,
                    token_ids=ids,
                    begin=begin,
                    end=end,
                    view=SlotView(end, pages),
                    chunked=begin == 0,
                )
                runner.forward_prompt(part)
        plain = torch.stack(
            [row_hidden(runner, texts[:1], [LENGTH + i], 1)[0, 0] for i in range(8)]
        )
        starts = [LENGTH, LENGTH - 3, LENGTH - 9, LENGTH - 20]
        other_texts = [texts[0][: LENGTH + 1] + texts[1][LENGTH + 1 :]]
        for slots, width in (
            *((1, width) for width in range(2, 9)),
            (2, 1),
            (3, 3),
            (4, 5),
            (4, 9),
        ):
            if slots == 1:
                assert torch.equal(row_hidden(runner, other_texts, starts, width)[0, 0], plain[0])
            hidden = row_hidden(runner, texts[:slots], starts, width)[
                0, :8
            ]  # the rows after it are right again
            assert torch.equal(hidden, plain[: len(hidden)]), (slots, width)

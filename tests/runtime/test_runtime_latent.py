"""Latent attention and routed experts in whole models: published figures, equal bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.block_config import LatentConfig
from spd.formats.rope_config import RopeConfig
from spd.runtime.layers.rotary import inverse_frequencies
from spd.runtime.models import family_layout
from spd.runtime.models.weights import expected_tensors
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.rows import PromptPart, SlotView
from tests.helpers import make_engine, random_prompts, read_model_config

pytestmark = pytest.mark.usefixtures("every_trial")


def test_figures_of_deepseek_v3(tiny: Callable[..., Path]) -> None:
    """DeepSeek-V3's own numbers, in few layers."""
    rope = RopeConfig("yarn", 10000.0, 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    wide = replace(read_model_config(tiny("deepseek_v3")), hidden_size=7168, num_heads=128, head_dim=192)
    config = replace(wide, latent=LatentConfig(1536, 512, 128, 64, 128, True), rope=rope)
    attention = family_layout(config).layers[0].attention
    assert attention.scale == pytest.approx(0.135234, abs=5e-7) and attention.cache == ((576,),)
    share = inverse_frequencies(rope, 64) / inverse_frequencies(RopeConfig("default", 10000.0), 64)
    torch.testing.assert_close(share[:11], torch.ones(11))
    torch.testing.assert_close(share[23:], torch.full((9,), 1 / 40))
    assert 1 / 40 < float(share[22]) < float(share[11]) < 1, "the ramp runs from 10 to 23"
    shapes = expected_tensors(config, family_layout(config))
    wanted = {"kv_a_proj_with_mqa": (576, 7168), "kv_b_proj": (32768, 512), "q_b_proj": (24576, 1536)}
    assert {name: shapes[f"model.layers.0.self_attn.{name}.weight"] for name in wanted} == wanted


LENGTH = 75


def row_hidden(runner: ModelRunner, texts: Sequence[Any], starts: Sequence[int], width: int) -> torch.Tensor:
    """Hidden states [S, width, hidden] of windows at `starts` of texts whose beginnings are in the cache."""
    ids = torch.tensor([t[s : s + width] for t, s in zip(texts, starts, strict=False)])
    views = [SlotView(LENGTH + 40, range(2 + 8 * i, 10 + 8 * i)) for i in range(len(ids))]
    table = torch.stack([runner.page_row(view.pages, 8) for view in views])
    rows = runner.prompt_rows(ids, torch.tensor(starts)[: len(ids), None], table)
    return runner.forward(rows, table, views).hidden


@pytest.mark.covers(1)
@pytest.mark.parametrize(
    ("dtype", "kernels"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "auto")]
)
@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek_v2", "glm4_moe", "qwen3_moe"])
def test_rows_have_equal_bits(tiny: Callable[..., Path], variant: str, dtype: str, kernels: str) -> None:
    """One row, with 0 to 7 other rows behind or before it and up to 3 other slots beside it."""
    # Wide enough that products of few rows could take another path: K above 320.
    folder = tiny(variant, hidden=384, intermediate=448, layers=2)
    runner = make_engine(folder, dtype=dtype, kernels=kernels, slots=4)._device.runner
    assert runner.buckets is None or runner.buckets[0] <= 16, "else every window has one size"
    texts = random_prompts(4, LENGTH + 20, 256)
    with torch.inference_mode():
        for slot in range(4):
            pages = range(2 + 8 * slot, 10 + 8 * slot)
            table, ids = runner.page_row(pages, 8)[None], torch.tensor([texts[slot]])
            for begin, end in ((0, 64), (64, LENGTH)):
                part = PromptPart(0, ids, begin, end, SlotView(end, pages), ())
                runner.forward_prompt(part, table, chunked=begin == 0)
        plain = torch.stack([row_hidden(runner, texts[:1], [LENGTH + i], 1)[0, 0] for i in range(8)])
        starts = [LENGTH, LENGTH - 3, LENGTH - 9, LENGTH - 20]
        strangers = [texts[0][: LENGTH + 1] + texts[1][LENGTH + 1 :]]
        for slots, width in (*((1, width) for width in range(2, 9)), (2, 1), (3, 3), (4, 5), (4, 9)):
            if slots == 1:
                assert torch.equal(row_hidden(runner, strangers, starts, width)[0, 0], plain[0])
            found = row_hidden(runner, texts[:slots], starts, width)[0, :8]  # the rows behind are right again
            assert torch.equal(found, plain[: len(found)]), (slots, width)

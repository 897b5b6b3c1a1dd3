"""Which sizes an attended context's last block may have: those that give a whole block's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.attention.paged_attention import KV_BLOCK, AttentionHeads, MaskPlan, Scores, paged_attention
from spd.kernels.attention.rotary_store import Pools
from spd.runtime.round import arithmetic_probe
from spd.runtime.round.arithmetic_probe import admitted_parts
from spd.runtime.round.model_runner import context_for

pytestmark = pytest.mark.usefixtures("every_trial")

HEADS = AttentionHeads(4, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "start"), [(2, 0), (5, KV_BLOCK)])
def test_a_part_that_differs_in_one_bit_is_refused(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, start: int
) -> None:
    """In one number of rows, in the first block or in the second."""
    honest = admitted_parts(HEADS, dtype, 64, (2, 5, 32))
    assert honest or torch.backends.cpu.get_cpu_capability() != "AVX512", "else nothing is shown"
    part = max(honest, default=KV_BLOCK // 2)

    def attend(query: Tensor, pools: Pools, plan: Any, scores: Scores) -> Tensor:
        mixed = paged_attention(query, pools, plan, scores)
        assert isinstance(plan, MaskPlan) and plan.masks[None][0] is not None
        if query.shape[1] == rows and plan.masks[None][0].bias.shape[-1] == start + part:
            mixed[0, -1, -1, -1] = 0
        return mixed

    monkeypatch.setattr(arithmetic_probe, "paged_attention", attend)
    assert admitted_parts(HEADS, dtype, 64, (2, 5, 32)) == tuple(p for p in honest if p != part)


def test_contexts_are_whole_blocks_and_a_part() -> None:
    lengths = (0, 1, 128, 129, 256, 257, 512, 513, 700, 1024)
    assert [context_for(length, (128, 256)) for length in lengths] == [
        *(0, 128, 128, 256, 256, 512, 512, 640, 768, 1024)
    ]
    assert [context_for(length, (256,)) for length in (1, 257, 513)] == [256, 512, 768]
    assert [context_for(length, ()) for length in (1, 512, 513)] == [512, 512, 1024]

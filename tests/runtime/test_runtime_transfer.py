"""Small values reach the device in one way, which tests of a GPU delay and spoil."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from spd.runtime import SamplingParams
from spd.runtime.round import transfer
from tests.helpers import make_engine, random_prompts, replace_transfers, run_all

SPD = Path(transfer.__file__).parents[2]


def test_whatever_brings_them_can_be_replaced(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, work = (
        tiny(),
        (random_prompts(3, 40, 256), [SamplingParams(max_tokens=9, stop_token_ids=(5,))] * 3),
    )
    expected = [run.tokens for run in run_all(make_engine(model, spec="ngram", slots=2), *work)]
    seen: list[int] = []

    def counted(values: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
        seen.append(len(values))
        return transfer.to_device(values, dtype, device)

    engine = make_engine(model, spec="ngram", slots=2)
    replaced = replace_transfers(monkeypatch, counted)
    importing = {
        ".".join(("spd", *path.relative_to(SPD).with_suffix("").parts))
        for path in SPD.rglob("*.py")
        if "import to_device" in path.read_text(encoding="utf-8")
    }
    assert replaced == importing and len(importing) > 1
    assert [run.tokens for run in run_all(engine, *work)] == expected
    assert {40, 1} <= set(seen), "prompts and stop ids"

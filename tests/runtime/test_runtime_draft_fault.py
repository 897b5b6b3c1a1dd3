"""The judgement of drafts at the end of a request: a drafter that does not help is named, with the reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, RequestMetrics, SamplingParams
from spd.runtime.engine.draft_fault import judge_drafts
from spd.runtime.engine.draft_length import DraftLength
from tests.helpers import make_fast_engine

PROMPT = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"


def judged(outcomes: dict[tuple[int, int], int], length: int = 100, **plan: Any) -> RequestMetrics:
    """Return the metrics of a request with these outcomes of rounds, after its judgement."""
    tokens = sum((accepted + 1) * times for (_, accepted), times in outcomes.items())
    metrics = RequestMetrics(outcomes=outcomes, completion_tokens=tokens)
    times = DraftLength(4, adaptive=True)
    for _ in range(3):  # a round of four drafts takes twice the time of a plain one
        times.observe_cost(0, 0.01, 0.0, 0, gap=0.0)
        times.observe_cost(4, 0.012, 0.008, 4, gap=0.0)
    sequence: Any = SimpleNamespace(
        metrics=metrics,
        length=length,
        draft_cap=plan.pop("draft_cap", 4),
        request=SimpleNamespace(grammar=None),
    )
    fields: Any = {
        "spec": plan.pop("spec", "mtp"),
        "adaptive": plan.pop("adaptive", True),
        "config": SimpleNamespace(synthetic_acceptance=plan.pop("imposed", None)),
        "shape": SimpleNamespace(draft_ctx=plan.pop("draft_ctx", 1000)),
    }
    assert not plan
    judge_drafts(sequence, SimpleNamespace(**fields), times)  # type: ignore[arg-type]
    return metrics


FEW = 23


@pytest.mark.parametrize(
    ("outcomes", "options", "fault"),
    [
        ({(4, 0): 31, (4, 2): 1}, {}, "chance"),
        ({(4, 0): 28, (4, 1): 4}, {}, ""),
        ({(4, 0): FEW}, {}, ""),
        ({(4, 0): 40}, {"draft_cap": 0}, ""),
        ({(4, 0): 40}, {"imposed": 2.0}, ""),
        ({(4, 0): 40}, {"spec": "ngram"}, ""),
        ({(4, 0): 40}, {"spec": "draft+ngram"}, "chance"),
        ({(0, 0): 30, (4, 3): 10}, {}, "cost"),
        ({(0, 0): 30, (4, 3): 10}, {"length": 1001}, "context"),
        ({(0, 0): 30, (4, 3): 40}, {"length": 1001}, ""),
        ({(4, 0): 20, (4, 1): 20}, {"adaptive": False}, "cost"),
        ({(4, 1): 20, (4, 2): 20}, {"adaptive": False}, ""),
    ],
)
def test_drafts_that_do_not_help_are_told_with_the_reason(
    outcomes: dict[tuple[int, int], int], options: dict[str, Any], fault: str
) -> None:
    metrics = judged(outcomes, **options)
    assert metrics.draft_fault == fault
    note = metrics.draft_note("mtp")
    assert (note is None) == (not fault) and "\n" not in str(note)
    assert metrics.speculative_decoding("mtp", 4)["note"] == note


def test_a_note_has_the_figures_it_speaks_of() -> None:
    assert "1 of 32 first drafts" in str(judged({(4, 0): 31, (4, 2): 1}).draft_note("mtp"))
    note = str(judged({(4, 0): 20, (4, 1): 20}, adaptive=False).draft_note("mtp"))
    assert "0 of 40 rounds had no drafts" in note and "with 1.50 tokens a round" in note
    assert note.endswith("they would have to bring 2.00")


def swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """Return what multiplies embedding and state in the other order."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1).contiguous()


def test_a_head_that_reads_its_inputs_in_the_wrong_order_is_found(tmp_path: Path) -> None:
    """The demo's own head is right; with its two inputs swapped it drafts as by chance.

    Beside other work the right head may be said to cost more than it brings: that is measured.
    """
    broken = tmp_path / "broken"
    shutil.copytree(demo_folder(), broken, ignore=shutil.ignore_patterns("draft", "eagle3"))
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("eh_proj.weight"))
    weights[name] = swap_halves(weights[name])
    save_file(weights, broken / "model.safetensors")
    faults = []
    for folder in (demo_folder(), broken):
        engine: Engine = make_fast_engine(folder, spec="mtp", adaptive=True, ctx=256)
        assert engine.tokenizer is not None
        ids = tuple(engine.tokenizer.encode(PROMPT))
        params = SamplingParams(max_tokens=120, ignore_eos=True)
        (done,) = engine.generate([Request("a", ids, params)])
        assert done.metrics is not None
        faults.append(done.metrics.draft_fault)
        engine.close()
    assert faults[0] in ("", "cost")
    assert faults[1] == "chance"

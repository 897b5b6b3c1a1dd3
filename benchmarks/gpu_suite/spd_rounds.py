"""Probe: does speculation change a token on this device, and what does it bring.

The engine generates with speculation off and then with every drafter, k and lag; each text must equal
the plain one. On the demo acceptance is natural; matrices as small as the demo's can hide a fault of
the larger ones, so a second probe writes the 0.35 B recipe to a temporary folder and repeats it there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.statistics import summarize
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, EngineConfig, Request, SamplingParams

QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = (
    QUESTION.format("What does os.path.join do?"),
    QUESTION.format("What does json.dumps do?"),
    "def read_lines(path):\n    with open(path) as file:\n",
    "import os\nimport sys\nimport os\nimport sys\nimport os\n",
)


@dataclass(frozen=True)
class Setting:
    """One way to speculate at fixed k; method "off" is plain decoding. No lag is the plan's choice."""

    method: str
    k: int = 0
    lag: int | None = None

    @property
    def name(self) -> str:
        """A label for the report."""
        return (
            self.method + (f"_k{self.k}" if self.k else "") + ("" if self.lag is None else f"_lag{self.lag}")
        )


PLAIN = Setting("off")
SETTINGS = (
    Setting("off", lag=1),
    Setting("ngram", 1),
    Setting("ngram", 4),
    Setting("draft", 1),
    Setting("draft", 4),
    Setting("draft", 4, lag=0),
    Setting("draft", 4, lag=1),
    Setting("draft", 7, lag=2),
)


@dataclass(frozen=True)
class Outcome:
    """What one setting gave for all prompts."""

    texts: list[list[int]]
    tokens_per_second: list[float]
    acceptance_lengths: list[float]


def generate_all(
    folder: Path,
    draft: Path,
    device: str,
    setting: Setting,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> Outcome:
    """Generate every prompt on a fresh engine; the first prompt runs twice, for warming up."""
    speculation: dict[str, Any] = {"spec": setting.method}
    if setting.method != "off":
        speculation |= {"draft_max": setting.k, "adaptive": False}
    if setting.method == "draft":
        speculation["draft_model"] = draft
    engine = Engine(EngineConfig(model=folder, device=device, lag=setting.lag, **speculation))
    outcome = Outcome([], [], [])
    for index, prompt in enumerate([prompts[0], *prompts]):
        request = Request(id=str(index), prompt_ids=tuple(prompt), params=params)
        ids: list[int] = []
        first = last = began = time.perf_counter()
        first_tokens = 0
        for event in engine.generate([request]):
            last = time.perf_counter()
            if not ids:
                first, first_tokens = last, len(event.token_ids)
            ids += event.token_ids
        if index:
            outcome.texts.append(ids)
            seconds = last - first if last > first else last - began
            outcome.tokens_per_second.append((len(ids) - first_tokens) / seconds)
            outcome.acceptance_lengths.append(engine.metrics(request.id).mean_acceptance_length)
    engine.close()
    return outcome


def differing_tokens(text: Sequence[int], other: Sequence[int]) -> int:
    """Count the positions at which two texts differ, those that only one has included."""
    return sum(a != b for a, b in zip(text, other, strict=False)) + abs(len(text) - len(other))


def compare(
    folder: Path,
    draft: Path,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    device: str = "cuda",
    settings: Sequence[Setting] = SETTINGS,
) -> dict[str, Any]:
    """Compare every setting with plain decoding at temperature 0 and 0.8; counts differing tokens."""
    found: dict[str, Any] = {}
    total = 0
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=7)
        plain = generate_all(folder, draft, device, PLAIN, prompts, params)
        rows = {PLAIN.name: _row(plain, plain)}
        for setting in settings:
            rows[setting.name] = _row(generate_all(folder, draft, device, setting, prompts, params), plain)
        total += sum(row["differing_tokens"] for row in rows.values())
        found[f"temperature_{temperature}"] = rows
    return {"differing_tokens": total, "acceptance": "natural", **found}


def _row(outcome: Outcome, plain: Outcome) -> dict[str, Any]:
    pairs = list(zip(outcome.texts, plain.texts, strict=True))
    speed = summarize(outcome.tokens_per_second)
    return {
        "tokens": sum(len(text) for text in outcome.texts),
        "differing_tokens": sum(differing_tokens(text, other) for text, other in pairs),
        "tokens_per_second": speed.as_dict(),
        "speedup": speed.median / summarize(plain.tokens_per_second).median,
        "acceptance_length": summarize(outcome.acceptance_lengths).as_dict(),
    }


def run() -> dict[str, Any]:
    """Compare on the demo that ships with spd."""
    tokenizer = Tokenizer.open(demo_folder())
    prompts = [tokenizer.encode(text, parse_special=True) for text in TEXTS]
    return compare(demo_folder(), demo_draft_folder(), prompts, tokens=192)


def run_medium() -> dict[str, Any]:
    """Compare on the 0.35 B recipe, written to a temporary folder."""
    from tests.recipes.medium import write_medium, write_medium_draft

    with tempfile.TemporaryDirectory() as place:
        folder = write_medium(Path(place) / "medium")
        draft = write_medium_draft(Path(place) / "draft", folder)
        prompts = [[300 + (37 * seed + 101 * i) % 7000 for i in range(40)] for seed in range(3)]
        return compare(folder, draft, prompts, tokens=128, settings=SETTINGS[2:])

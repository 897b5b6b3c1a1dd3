"""Probe: speculation changes no token of the demo in any form of its weights; see `spd_rounds`.

The demo is a DeepSeek-V3-shaped model with an MTP layer. It runs as stored, with a cache in eight
bits too, rounded to int8 and int4, and as its twin in FP8 blocks; alone and in batches of 16,
captured and eager, up to two rounds behind. Each form's full settings compare more than 100,000 tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.round_settings import Setting
from benchmarks.gpu_suite.spd_rounds import RUNS, assert_complete, compare, demo_prompts
from spd.formats.demo import demo_draft_folder, demo_folder

FORMS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    "cache in int8": {"kv": "int8"},
    "bfloat16": {},
}
"""Those that nothing else runs first: a probe that is stopped keeps what came before."""
_SHORT: dict[str, Any] = {"requests": 6, "tokens": 48}
SETTINGS = (
    *(Setting("mtp", k, lag=lag, slots=16) for k in (3, 1) for lag in (1, 0, 2)),
    Setting("mtp", 3, requests=9),
    Setting("off", slots=16),
    Setting("ngram", 4, slots=16),
    Setting("draft", 4, slots=16),
    *(Setting("mtp", k, lag=lag, graphs=False, **_SHORT) for k in (3, 1) for lag in (0, 1, 2)),
    *(Setting("mtp", k, lag=lag, **_SHORT) for k in (3, 1) for lag in (0, 1, 2)),
)
TOKENS = 192


def run(
    forms: Sequence[str] = tuple(FORMS),
    settings: Sequence[Setting] = SETTINGS,
    prompts: Sequence[Sequence[int]] | None = None,
    tokens: int = TOKENS,
    runs: Sequence[str] = tuple(RUNS),
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Compare every setting with plain decoding, form by form of the weights."""
    from tests.recipes.packed_twin import write_twin

    report: dict[str, Any] = {"forms": {}}
    with tempfile.TemporaryDirectory() as place:
        for form in forms:
            folder = (
                write_twin(demo_folder(), Path(place) / "twin") if form == "fp8" else demo_folder()
            )
            for form_report in compare(
                folder,
                demo_draft_folder(),
                prompts or demo_prompts(),
                tokens=tokens,
                settings=settings,
                reference=Setting("off", slots=16),
                runs=runs,
                **FORMS[form],
                **options,
            ):
                report["forms"][form] = form_report
                yield report
    rows = [(form, form_report["settings"]) for form, form_report in report["forms"].items()]
    assert_complete(
        {f"{form} {name}": row for form, form_report in rows for name, row in form_report.items()}
    )

"""Samples and results made by hand."""

from typing import Any

from spd.runtime.lab.load import Sample, Workload

PLAIN: dict[str, Any] = {
    "spec": "off",
    "draft_max": 0,
    "adaptive": True,
    "verify": "coupled",
    "lag": 0,
}
PLAIN |= {"graphs": False, "synthetic_acceptance": None, "tp": 1, "draft_tp": 1}
DRAFT: dict[str, Any] = {**PLAIN, "spec": "draft", "draft_max": 2, "adaptive": False}


def make_sample(config: int, repetition: int, seconds: float, **changes: Any) -> Sample:
    """Return a sample of ten tokens after the first in `seconds`."""
    values: dict[str, Any] = {
        "work": Workload(category="code", temperature=0.0),
        "prompts": ["code/1"],
    }
    values |= {"tokens": 11, "tokens_after_first": 10, "rounds": 10, "speed": (10.0, seconds)}
    values |= {"drafted_per_position": [], "accepted_per_position": [], "ttft_ms": [500.0]}
    values |= {"tpot_ms": [100 * seconds], "itl_ms": [100 * seconds] * 10}
    defaults = {"config": config, "repetition": repetition, "seconds": seconds + 0.5}
    return Sample(**{**values, **defaults, **changes})

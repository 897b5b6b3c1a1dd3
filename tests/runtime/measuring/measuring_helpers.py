"""Samples and results made by hand."""

from typing import Any

from spd.runtime.lab.load import Load, Sample, Work

PLAIN: dict[str, Any] = {
    "spec": "off",
    "draft_max": 0,
    "adaptive": True,
    "verify": "coupled",
    "lag": 0,
    "graphs": False,
    "synthetic_acceptance": None,
}
DRAFT: dict[str, Any] = {**PLAIN, "spec": "draft", "draft_max": 2, "adaptive": False}


def make_sample(config: int, repetition: int, seconds: float, **changes: Any) -> Sample:
    """Ten tokens after the first in `seconds`."""
    values: dict[str, Any] = {
        "config": config,
        "work": Work("code", 0.0, None, Load()),
        "repetition": repetition,
        "prompts": ["code/1"],
        "prompt_tokens": 5,
        "tokens": 11,
        "seconds": seconds + 0.5,
        "tokens_after_first": 10,
        "decode_seconds": seconds,
        "ttft_ms": [500.0],
        "tpot_ms": [100 * seconds],
        "itl_ms": [100 * seconds] * 10,
        "rounds": 10,
        "drafted_per_position": [],
        "accepted_per_position": [],
        "part_ms": {"draft": 0.0, "verify": 900 * seconds, "rest": 10.0, "host": 20.0},
    }
    return Sample(**{**values, **changes})

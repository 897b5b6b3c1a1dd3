"""What a server has done, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spd.cli.serve.service import Service

Values = Mapping[str, float] | float


def as_prometheus(service: Service) -> str:
    """Every figure, in the text format of version 0.0.4."""
    return "".join(_lines(service))


def _lines(service: Service) -> Iterator[str]:
    counters, engine = service.counters, service.engine
    used, pages = engine.pages
    by_position = {f'position="{i}"': n for i, n in enumerate(counters.accepted_by_position)}
    waiting = max(0, service.open - service.slots)
    table: tuple[tuple[str, str, str, Values], ...] = (
        ("requests_total", "counter", "Requests by how they ended.", _by("reason", counters.ended)),
        ("refused_total", "counter", "Calls refused, by status.", _by("status", counters.refused)),
        ("requests_running", "gauge", "Requests in slots.", service.open - waiting),
        ("requests_waiting", "gauge", "Requests that wait for a slot.", waiting),
        ("slots", "gauge", "Requests that can decode together.", service.slots),
        ("prompt_tokens_total", "counter", "Tokens of prompts.", counters.prompt_tokens),
        ("cached_tokens_total", "counter", "Tokens of prompts found in pages.", counters.cached_tokens),
        ("generation_tokens_total", "counter", "Generated tokens.", counters.generated_tokens),
        ("rounds_total", "counter", "Rounds of the engine.", engine.totals.rounds),
        ("pages_used", "gauge", "Pages of the cache that requests hold.", used),
        ("pages", "gauge", "Pages of the cache.", pages),
        ("spec_decode_num_drafts_total", "counter", "Rounds with drafts.", counters.draft_rounds),
        ("spec_decode_num_draft_tokens_total", "counter", "Verified drafts.", counters.draft_tokens),
        ("spec_decode_num_accepted_tokens_total", "counter", "Accepted drafts.", counters.accepted_tokens),
        (
            "spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Accepted drafts by position.",
            by_position,
        ),
        ("first_token_seconds_total", "counter", "Time to first tokens.", counters.first_token_seconds),
        ("queue_seconds_total", "counter", "Time in the queue.", counters.queue_seconds),
    )
    for name, kind, help_text, values in table:
        yield f"# HELP spd_{name} {help_text}\n# TYPE spd_{name} {kind}\n"
        if isinstance(values, Mapping):
            yield from (f"spd_{name}{{{label}}} {value}\n" for label, value in sorted(values.items()))
        else:
            yield f"spd_{name} {values}\n"


def _by(label: str, counts: Mapping[str, int] | Mapping[int, int]) -> Mapping[str, float]:
    return {f'{label}="{key}"': count for key, count in counts.items()}

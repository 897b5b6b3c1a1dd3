"""Traces read back: the rounds of some requests, and what the header says of their engine. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spd.errors import UsageError
from spd.formats.files import LINES_LIMIT, read_input_text
from spd.runtime.engine.metrics import RoundRecord
from spd.runtime.plan.config import MAX_DRAFT

HEADER = "spd.trace/1"
PARTS = ("draft", "verify", "rest", "host")
"""Of a round's time."""


@dataclass(frozen=True)
class TraceHeader:
    """The first line of a trace file: what the rounds alone do not say."""

    model: str
    temperature: float
    plan: Mapping[str, Any]
    prompt_ids: tuple[int, ...] = ()
    schema: str = HEADER


@dataclass
class Trace:
    """Rounds in the order read, without those that follow a prompt: nothing was drafted for them."""

    rounds: list[RoundRecord] = field(default_factory=list)
    header: TraceHeader | None = None
    committed: dict[str, list[int]] = field(default_factory=dict)
    """Every committed token of each request, the first rounds' too."""

    def add(self, record: RoundRecord) -> None:
        """Take a round."""
        self.committed.setdefault(record.request, []).extend(record.committed)
        if record.round > 0:
            self.rounds.append(record)


def read_traces(paths: Iterable[Path]) -> list[Trace]:
    """One trace a file. Raises NotFoundError, and UsageError naming the line that is none."""
    return [_read(path) for path in paths]


def _round(value: Mapping[str, Any]) -> RoundRecord:
    """A round whose values are of their kinds; raises TypeError or KeyError for one that is none."""
    record = RoundRecord(**value)
    names, times = (record.request, record.method), [record.ms[part] for part in PARTS]
    whole = [*record.draft, *record.sampled, *record.committed, record.round, record.accepted]
    whole += [record.position, record.draft_forwards, record.k, record.match]
    for kind, values in ((str, names), (int, whole), ((int, float), times)):
        if not all(isinstance(value, kind) for value in values) or not (
            0 <= record.k <= MAX_DRAFT and isinstance(record.other_load, int | float)
        ):
            raise TypeError
    return record


def _read(path: Path) -> Trace:
    fix = "spd generate --trace FILE writes one"
    lines = read_input_text(path, fix, LINES_LIMIT).splitlines()
    trace = Trace()
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if value.get("schema") == HEADER:
                kinds = {"temperature": float, "plan": dict, "prompt_ids": tuple}
                trace.header = TraceHeader(**{**value, **{n: kind(value[n]) for n, kind in kinds.items()}})
            else:
                trace.add(_round(value))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            if number == len(lines) > 1 and isinstance(error, json.JSONDecodeError):
                continue  # what a run that was killed left of its last line
            raise UsageError(
                f"{path}, line {number} is no round of a trace", fix=["spd generate --trace FILE writes them"]
            ) from None
    if not trace.rounds:
        raise UsageError(f"{path} holds no rounds beyond a first one", fix=["a longer reply: -n 256"])
    return trace

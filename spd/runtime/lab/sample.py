"""One pass in numbers: what a row of a benchmark is made of. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from spd.runtime.lab.load import Pass

if TYPE_CHECKING:
    from spd.runtime.engine.metrics import RoundRecord
    from spd.runtime.lab.sweep import Work


@dataclass
class Sample:
    """Counts and times of one pass by the engine of configuration `config`; seconds and milliseconds."""

    config: int
    work: Work
    repetition: int
    prompts: list[str]
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_after_first: int
    decode_seconds: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    rounds: int
    drafted: int
    accepted: int
    drafted_per_position: list[int]
    tried_per_position: list[int]
    """Drafts whose predecessors in the round were all accepted."""
    accepted_per_position: list[int]
    histogram: list[int]
    draft_ms: float
    verify_ms: float
    rest_ms: float
    host_ms: float
    """A round's share of the wall time that the device did not account for, where one request runs."""
    finish: dict[str, int] = field(default_factory=dict)

    @property
    def speed(self) -> tuple[float, float]:
        """Tokens, and the seconds they took, as the load counts them: see `rows.speed_words`."""
        load = self.work.load
        if load.rate is not None:
            return float(len(self.tpot_ms)), sum(self.tpot_ms) / 1000
        if load.concurrency > 1:
            return float(self.tokens), self.seconds
        return float(self.tokens_after_first), self.decode_seconds


def take_sample(
    ran: Pass,
    config: int,
    work: Work,
    repetition: int,
    prompts: Sequence[str],
) -> Sample:
    """Count one pass. Rounds that follow a prompt hold no drafts and are no steps of decoding."""
    lines = ran.timelines
    later = [record for record in ran.records if record.round > 0]
    drafted, tried, accepted = per_position(later)
    times = {part: _mean(record.ms[part] for record in later) for part in ("draft", "verify", "rest")}
    decode = sum(line.decode_seconds for line in lines)
    host = 0.0
    if work.load.concurrency == 1 and work.load.rate is None and later:
        host = max(0.0, 1000 * decode / len(later) - sum(times.values()))
    return Sample(
        config=config,
        work=work,
        repetition=repetition,
        prompts=list(prompts),
        prompt_tokens=sum(len(line.request.prompt_ids) for line in lines),
        tokens=sum(len(line.token_ids) for line in lines),
        seconds=ran.seconds,
        tokens_after_first=sum(line.tokens_after_first for line in lines),
        decode_seconds=decode,
        ttft_ms=[1000 * line.ttft for line in lines if line.chunks],
        tpot_ms=[1000 * line.tpot for line in lines if line.tpot is not None],
        itl_ms=[round(1000 * gap, 3) for line in lines for gap in line.gaps()],
        rounds=len(later),
        drafted=sum(drafted),
        accepted=sum(metric.draft_n_accepted for metric in ran.metrics),
        drafted_per_position=drafted,
        tried_per_position=tried,
        accepted_per_position=accepted,
        histogram=_histogram(later),
        draft_ms=times["draft"],
        verify_ms=times["verify"],
        rest_ms=times["rest"],
        host_ms=host,
        finish=dict(Counter(str(line.finish_reason) for line in lines)),
    )


def per_position(records: Sequence[RoundRecord]) -> tuple[list[int], list[int], list[int]]:
    """How often a draft stood at each position, was tried (all before it accepted), and was accepted."""
    longest = max((len(record.draft) for record in records), default=0)
    drafted, tried, accepted = ([0] * longest for _ in range(3))
    for record in records:
        for position in range(len(record.draft)):
            drafted[position] += 1
            tried[position] += record.accepted >= position
            accepted[position] += record.accepted > position
    return drafted, tried, accepted


def _histogram(records: Sequence[RoundRecord]) -> list[int]:
    counts = [0] * (1 + max((record.accepted for record in records), default=0))
    for record in records:
        counts[record.accepted] += 1
    return counts


def _mean(values: Any) -> float:
    listed = list(values)
    return fmean(listed) if listed else 0.0

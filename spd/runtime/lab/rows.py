"""Samples into rows, one for each way of decoding and kind of work, and rows of two results compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, Protocol

from spd.runtime.lab.load import Sample
from spd.runtime.lab.statistics import Spread, percentile, repeat_interval, welch

ALL = "all"
KEYS = ("category", "temperature", "prompt_tokens_asked", "concurrency", "rate")
"""What a row shares with the plain row beside it."""
MACHINE = ("lag", "graphs", "tp")
"""Settings that a row's plain partner has too."""
MEMORY = ("weight_bytes", "draft_weight_bytes", "cache_bytes", "workspace_bytes", "graph_bytes")
"""Parts of a plan that add up to what an engine takes."""
IDENTITY = (*KEYS, "method", "draft_max", "adaptive", "verify", "draft_tp", *MACHINE)


class Reads(Protocol):
    """What a model reads in one forward pass; see `roofline.Floor`."""

    def seconds(self, context: float, rate: float) -> float:
        """With `context` positions in the cache, at `rate` bytes a second."""
        ...


def speed_words(row: Mapping[str, Any]) -> str:
    """What `tokens_per_second` counts in a row."""
    if row["rate"] is not None:
        return "1 / mean TPOT of a request"
    return "output tokens over wall time" if row["concurrency"] > 1 else "decode, first token left out"


def make_rows(
    samples: Sequence[Sample],
    plans: Mapping[int, Mapping[str, Any]],
    floors: Mapping[int, tuple[Reads | None, Reads | None]] = MappingProxyType({}),
    read_rate: float | None = None,
) -> list[dict[str, Any]]:
    """Rows in the order measured, those over all categories last. Takes whole repetitions only.

    floors: what the target and the draft model of a plan read; read_rate: bytes a second.
    """
    grouped: dict[tuple[Any, ...], list[Sample]] = {}
    for sample in samples:
        work = sample.work
        for category in (work.category, ALL):
            key = (category, work.temperature, work.prompt_tokens, work.load.concurrency, work.load.rate)
            grouped.setdefault((*key, sample.config), []).append(sample)
    categories = {sample.work.category for sample in samples}
    rows = []
    order = {group[:-1]: place for place, group in reversed(list(enumerate(grouped)))}
    for group in sorted(grouped, key=lambda group: (group[0] == ALL, order[group[:-1]], group[-1])):
        if group[0] == ALL and len(categories) < 2:
            continue
        row = _row(dict(zip(KEYS, group[:-1], strict=True)), plans[group[-1]], _complete(grouped, group))
        if row is not None:
            row["roofline"] = _roofline(row, *floors.get(group[-1], (None, None)), read_rate)
            rows.append(row)
    for row in rows:
        _pair(row, rows)
    return rows


def _complete(groups: Mapping[tuple[Any, ...], Sequence[Sample]], of: tuple[Any, ...]) -> list[list[Sample]]:
    """A group's samples by repetition, without repetitions in which it lacks a pass that others have."""
    counts: dict[tuple[Any, int], int] = {}
    for group, samples in groups.items():
        if group[:-1] == of[:-1]:
            for sample in samples:
                counts[group, sample.repetition] = counts.get((group, sample.repetition), 0) + 1
    by_repetition: dict[int, list[Sample]] = {}
    for sample in groups[of]:
        by_repetition.setdefault(sample.repetition, []).append(sample)
    most = max(counts.values())
    return [each for _, each in sorted(by_repetition.items()) if len(each) == most]


def _row(
    key: dict[str, Any], plan: Mapping[str, Any], repetitions: Sequence[Sequence[Sample]]
) -> dict[str, Any] | None:
    samples = [sample for repetition in repetitions for sample in repetition]
    speeds = [_speed(repetition) for repetition in repetitions]
    if not samples or not all(speeds):
        return None
    row: dict[str, Any] = {
        **key,
        "method": "plain" if plan["spec"] == "off" else plan["spec"],
        "draft_max": plan["draft_max"],
        "adaptive": plan["adaptive"] and plan["spec"] != "off",
        "verify": plan["verify"],
        "lag": plan["lag"],
        "graphs": plan["graphs"],
        "tp": plan.get("tp", 1),
        "draft_tp": plan.get("draft_tp", 1),
        "acceptance": "imposed" if plan["synthetic_acceptance"] is not None else "natural",
        "repetitions": len(repetitions),
        "tokens_per_second": repeat_interval(speeds).as_dict(),
        "prompt_tokens": fmean(s.prompt_tokens / len(s.prompts) for s in samples),
        "output_tokens": sum(s.tokens for s in repetitions[0]),
        "mean_output": sum(s.tokens for s in samples) / sum(len(s.prompts) for s in samples),
        "memory_bytes": sum(plan.get(part, 0) for part in MEMORY),
    }
    row["counts_as_speed"] = speed_words(row)
    return {**row, **_latencies(samples), **_speculation(samples), **_load(samples, key["rate"])}


def _speed(samples: Iterable[Sample]) -> float:
    pairs = [sample.speed for sample in samples]
    seconds = sum(seconds for _, seconds in pairs)
    return sum(tokens for tokens, _ in pairs) / seconds if seconds else 0.0


def _latencies(samples: Sequence[Sample]) -> dict[str, Any]:
    found = {}
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        values = [value for sample in samples for value in getattr(sample, name)]
        found[name] = (
            {"median": median(values), "mean": fmean(values), "p99": percentile(values, 0.99)}
            if values
            else None
        )
    return found


def _speculation(samples: Sequence[Sample]) -> dict[str, Any]:
    rounds = sum(sample.rounds for sample in samples)
    drafted = _sums(s.drafted_per_position for s in samples)
    accepted = _sums(s.accepted_per_position for s in samples)
    tried = _sums(s.tried_per_position for s in samples)
    total = sum(drafted)
    after_first = sum(sample.tokens_after_first for sample in samples)
    return {
        "acceptance_length": after_first / rounds if rounds else 0.0,
        "acceptance_rate": sum(s.accepted for s in samples) / total if total else None,
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "conditional_rates": [a / t if t else 0.0 for a, t in zip(accepted, tried, strict=True)],
        "acceptance_histogram": _sums(s.histogram for s in samples),
        "rounds": rounds,
        "round_ms": {
            part: sum(getattr(s, f"{part}_ms") * s.rounds for s in samples) / rounds if rounds else 0.0
            for part in ("draft", "verify", "rest", "host")
        },
    }


def _load(samples: Sequence[Sample], rate: float | None) -> dict[str, Any]:
    requests, seconds = sum(len(s.prompts) for s in samples), sum(s.seconds for s in samples)
    tokens = sum(s.tokens for s in samples)
    return {
        "requests": requests,
        "requests_per_second": requests / seconds,
        "output_tokens_per_second": tokens / seconds,
    }


def _roofline(
    row: Mapping[str, Any], target: Reads | None, draft: Reads | None, rate: float | None
) -> dict[str, float | None] | None:
    """The share of a verification, and of a token's drafting, that reading alone would take."""
    if target is None or rate is None:
        return None
    context = row["concurrency"] * (row["prompt_tokens"] + row["mean_output"] / 2)
    times, drafts = row["round_ms"], sum(row["drafted_per_position"])
    floor = 1000 * target.seconds(context, rate)
    drafts_alone = (
        draft is not None and row["draft_max"] and "+" not in row["method"]
    )  # else some are lookup's
    a_draft = 1000 * draft.seconds(context, rate) if draft is not None and drafts_alone else None
    spent = times["draft"] * row["rounds"] / drafts if drafts else 0.0
    return {
        "read_bytes_per_second": rate,
        "verify_floor_ms": floor,
        "verify_share": floor / times["verify"] if times["verify"] else None,
        "draft_floor_ms": a_draft,
        "draft_share": a_draft / spent if a_draft is not None and spent else None,
    }


def _sums(lists: Iterable[Sequence[int]]) -> list[int]:
    total: list[int] = []
    for counts in lists:
        total.extend([0] * (len(counts) - len(total)))
        for i, count in enumerate(counts):
            total[i] += count
    return total


def _pair(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the ratio to the plain row of the same work, repetition by repetition, into the row."""
    same = [
        other
        for other in rows
        if other["method"] == "plain" and all(other[name] == row[name] for name in (*KEYS, *MACHINE))
    ]
    row["speed_up"] = None
    if row["method"] == "plain" or not same:
        return
    pairs = zip(row["tokens_per_second"]["values"], same[0]["tokens_per_second"]["values"], strict=False)
    row["speed_up"] = repeat_interval([mine / its for mine, its in pairs]).as_dict()


def verdict(spread: Mapping[str, Any] | Spread | None) -> str:
    """`faster`, `slower`, or `equal` where the interval of a ratio holds 1."""
    if spread is None:
        return ""
    low, high = (spread.low, spread.high) if isinstance(spread, Spread) else (spread["low"], spread["high"])
    if low is None or high is None or low <= 1 <= high:
        return "equal"
    return "faster" if low > 1 else "slower"


SIGNIFICANT = 0.05
"""A change is called one where noise alone would show as much in fewer cases than this."""
CONDITIONS = ("device", "dtype", "quantize", "kernels", "threads")
"""Of a plan: what a comparison may be about, so that rows match all the same, and it is said."""


@dataclass(frozen=True)
class Change:
    """One row of two benchmarks."""

    row: Mapping[str, Any]
    before: float
    after: float
    probability: float
    """Of a difference at least as large if nothing had changed (Welch's t on logarithms)."""

    @property
    def share(self) -> float:
        """The change as a share of what was before."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """`faster`, `slower` or `within noise`."""
        if self.probability > SIGNIFICANT:
            return "within noise"
        return "faster" if self.share > 0 else "slower"

    def regressed(self, threshold: float) -> bool:
        """Whether it is slower by more than `threshold`, and that is no noise."""
        return self.verdict == "slower" and -self.share > threshold

    def as_dict(self, threshold: float) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            **{name: self.row[name] for name in IDENTITY},
            "before": self.before,
            "after": self.after,
            "change": self.share,
            "probability": self.probability,
            "verdict": self.verdict,
            "regressed": self.regressed(threshold),
        }


@dataclass(frozen=True)
class Comparison:
    """Matched rows, and how many of each side had no partner."""

    changes: tuple[Change, ...]
    only_before: int
    only_after: int
    conditions: tuple[str, ...]
    """Where and in what the two ran, as far as that differs: `dtype bfloat16 → float32`."""


def row_key(result: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two rows must have in common to be compared: the work, how it was done, real or made-up."""
    settings = result["settings"]
    samples = [sample for sample in result.get("samples", ()) if _is_of(sample["work"], row)]
    names = {name for sample in samples for name in sample["prompts"]} or result["prompts"]
    prompts = frozenset(result["prompts"][name] for name in names)
    dummy = any(plan["load"] == "dummy" for plan in result["plans"])
    work = result["model"], settings["max_tokens"], settings["ignore_eos"], prompts, dummy
    return *work, row["acceptance"], *(row[name] for name in IDENTITY)


def _is_of(work: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a pass over that work is counted in the row."""
    load = work["load"]
    its = work["temperature"], work["prompt_tokens"], load["concurrency"], load["rate"]
    return row["category"] in (ALL, work["category"]) and its == tuple(row[name] for name in KEYS[1:])


def _keyed(result: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Rows by key; of those with one key, as two settings that come to the same give, each by its place."""
    seen: Counter[tuple[Any, ...]] = Counter()
    found = {}
    for row in result["rows"]:
        key = row_key(result, row)
        numbered = (*key, seen[key])
        found[numbered] = row
        seen[key] += 1
    return found


def _conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    plans = [result["plans"][0] if result["plans"] else {} for result in (before, after)]
    pairs = [(name, *(plan.get(name) for plan in plans)) for name in CONDITIONS]
    return tuple(f"{name} {then} → {now}" for name, then, now in pairs if then != now)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Match the rows of two results and test each for a change."""
    old, new = _keyed(before), _keyed(after)
    changes = tuple(_change(old[key], row) for key, row in new.items() if key in old)
    only = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    return Comparison(changes, *only, _conditions(before, after))


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> Change:
    samples: list[Sequence[float]] = [row["tokens_per_second"]["values"] for row in (before, after)]
    return Change(
        after,
        before["tokens_per_second"]["median"],
        after["tokens_per_second"]["median"],
        welch(*([log(value) for value in values] for values in samples)),
    )

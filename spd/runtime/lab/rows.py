"""Samples as rows, one for each way of decoding and workload, and rows of two results compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from math import ceil, exp, log, pi, sqrt
from statistics import fmean, median, stdev
from typing import Any, TypedDict

from spd.runtime.lab.load import Sample, Workload

ALL = "all"


class Interval(TypedDict):
    """A median of repetitions, and the interval of a second run's median; see `repeat_interval`."""

    median: float
    low: float | None
    high: float | None
    values: tuple[float, ...]
    half_width: float | None


class Latency(TypedDict):
    """Statistics of one latency, in milliseconds."""

    median: float
    mean: float
    p99: float


class Row(TypedDict):
    """One way of decoding on one workload: its identity, speeds, latencies and acceptance."""

    model: str
    concurrency: int
    rate: float | None
    category: str
    temperature: float
    prompt_tokens_asked: int | None
    method: str
    adaptive: bool
    draft_max: int
    verify: str
    draft_tp: int
    lag: int
    graphs: bool
    tp: int
    acceptance: str
    prompts: list[str]
    repetitions: int
    tokens_per_second: Interval
    ttft_ms: Latency | None
    tpot_ms: Latency | None
    itl_ms: Latency | None
    acceptance_length: float
    acceptance_rate: float | None
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    rounds: int
    speed_up: Interval | None
    over_first_model: Interval | None


class Result(TypedDict):
    """The fields of a result of `spd bench --json` that a comparison reads."""

    model: str
    settings: Mapping[str, object]
    prompts: Mapping[str, str]
    plans: Sequence[Mapping[str, object]]
    rows: Sequence[Mapping[str, Any]]


WORKLOAD_KEYS = tuple(field.name for field in fields(Workload))
"""The fields of a workload, which a row and its plain partner share."""
MACHINE_SETTINGS = ("lag", "graphs", "tp")
"""Settings that a row's plain partner has too."""
DRAFTING_SETTINGS = ("draft_max", "verify", "draft_tp")
IDENTITY = ("model", *WORKLOAD_KEYS, "method", "adaptive", *DRAFTING_SETTINGS, *MACHINE_SETTINGS)


def make_rows(
    samples: Sequence[Sample], plans: Sequence[Mapping[str, Any]], models: Sequence[str] = ()
) -> list[Row]:
    """Return rows of complete repetitions in the order measured, those over all categories last.

    plans, models: of each configuration its plan and the name of its model.
    """
    grouped: dict[Workload, dict[int, dict[int, list[Sample]]]] = {}
    several = len({sample.work.category for sample in samples}) > 1
    for sample in samples:
        for work in (sample.work, *[replace(sample.work, category=ALL)] * several):
            repetitions = grouped.setdefault(work, {}).setdefault(sample.config, {})
            repetitions.setdefault(sample.repetition, []).append(sample)
    rows = []
    for work in sorted(grouped, key=lambda work: work.category == ALL):
        full_count = max(
            len(samples_of)
            for repetitions in grouped[work].values()
            for samples_of in repetitions.values()
        )
        for config, repetitions in sorted(grouped[work].items()):
            complete = [
                samples_of
                for _, samples_of in sorted(repetitions.items())
                if len(samples_of) == full_count
            ]
            speeds = [_total_speed(samples_of) for samples_of in complete]
            if complete and all(speeds):
                model = models[config] if models else ""
                rows.append(
                    _make_row(
                        model=model,
                        work=work,
                        plan=plans[config],
                        repetitions=complete,
                        speeds=speeds,
                    )
                )
    for row in rows:
        row["speed_up"] = _speed_up(row, rows)
        row["over_first_model"] = _over_first_model(row, rows)
    return rows


def _total_speed(samples: Iterable[Sample]) -> float:
    """Return the tokens, or requests, a second over all samples together; 0 without any time."""
    speeds = [sample.speed for sample in samples]
    tokens = sum(count for count, _ in speeds)
    seconds = sum(duration for _, duration in speeds)
    return tokens / seconds if seconds else 0.0


def _make_row(
    model: str,
    work: Workload,
    plan: Mapping[str, Any],
    repetitions: Sequence[Sequence[Sample]],
    speeds: Sequence[float],
) -> Row:
    """Return the row of a configuration on a workload, without its ratios to other rows."""
    samples = [sample for repetition in repetitions for sample in repetition]
    rounds = sum(sample.rounds for sample in samples)
    drafted = _sum_by_position(sample.drafted_per_position for sample in samples)
    accepted = _sum_by_position(sample.accepted_per_position for sample in samples)
    after_first = sum(sample.tokens_after_first for sample in samples)
    return {
        "model": model,
        "concurrency": work.concurrency,
        "rate": work.rate,
        "category": work.category,
        "temperature": work.temperature,
        "prompt_tokens_asked": work.prompt_tokens_asked,
        "method": "plain" if plan["spec"] == "off" else plan["spec"],
        "adaptive": plan["adaptive"] and plan["spec"] != "off",
        "draft_max": plan["draft_max"],
        "verify": plan["verify"],
        "draft_tp": plan["draft_tp"],
        "lag": plan["lag"],
        "graphs": plan["graphs"],
        "tp": plan["tp"],
        "acceptance": "imposed" if plan["synthetic_acceptance"] is not None else "natural",
        "prompts": sorted({name for sample in samples for name in sample.prompts}),
        "repetitions": len(repetitions),
        "tokens_per_second": repeat_interval(speeds),
        "ttft_ms": _latency_statistics([ms for sample in samples for ms in sample.ttft_ms]),
        "tpot_ms": _latency_statistics([ms for sample in samples for ms in sample.tpot_ms]),
        "itl_ms": _latency_statistics([ms for sample in samples for ms in sample.itl_ms]),
        "acceptance_length": after_first / rounds if rounds else 0.0,
        "acceptance_rate": sum(accepted) / sum(drafted) if drafted else None,
        "drafted_per_position": drafted,
        "accepted_per_position": accepted,
        "rounds": rounds,
        "speed_up": None,
        "over_first_model": None,
    }


def _latency_statistics(values: Sequence[float]) -> Latency | None:
    """Return the median, mean and 99th percentile of latencies in milliseconds; None without
    any.
    """
    if not values:
        return None
    return {"median": median(values), "mean": fmean(values), "p99": percentile(values, 0.99)}


def _sum_by_position(lists: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums of lists, position by position; shorter ones count as filled with 0."""
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


def _speed_up(row: Row, rows: Sequence[Row]) -> Interval | None:
    """Return the ratio to the plain row of the same workload, repetition by repetition."""
    names = ("model", *WORKLOAD_KEYS, *MACHINE_SETTINGS)
    identity = _field_values(row, names)
    plain = [
        other
        for other in rows
        if other["method"] == "plain" and _field_values(other, names) == identity
    ]
    if row["method"] == "plain" or not plain:
        return None
    return _speed_ratio(row["tokens_per_second"], plain[0]["tokens_per_second"])


def _over_first_model(row: Row, rows: Sequence[Row]) -> Interval | None:
    """Return the ratio to the same work and method with the model that was named first."""
    names = [*WORKLOAD_KEYS, *MACHINE_SETTINGS, "method", "adaptive", "verify", "draft_tp"]
    if not row["adaptive"]:
        names.append("draft_max")  # an adaptive k has each model's own limit
    identity = _field_values(row, names)
    first = [other for other in rows if other["model"] == rows[0]["model"]]
    partner = next((other for other in first if _field_values(other, names) == identity), None)
    if partner is None or row in first:
        return None
    return _speed_ratio(row["tokens_per_second"], partner["tokens_per_second"])


def _field_values(row: Mapping[str, object], names: Sequence[str]) -> tuple[object, ...]:
    """Return the values of these fields of a row, in order."""
    return tuple(row[name] for name in names)


def _speed_ratio(speed: Interval, base: Interval) -> Interval:
    """Return the ratio of two speeds, paired by repetition."""
    pairs = zip(speed["values"], base["values"], strict=False)
    return repeat_interval([value / base_value for value, base_value in pairs])


def verdict(ratio: Interval | None) -> str:
    """Return `faster`, `slower`, or `within noise` where the interval of a ratio holds 1."""
    if ratio is None:
        return ""
    if ratio["low"] is None or ratio["high"] is None or ratio["low"] <= 1 <= ratio["high"]:
        return "within noise"
    return "faster" if ratio["low"] > 1 else "slower"


CONDITIONS = ("device", "dtype", "quantize", "activations", "kv", "kernels", "threads")
"""Fields of a plan that may differ between matching rows; a difference is reported."""


def compare_results(before: Result, after: Result, threshold: float) -> dict[str, Any]:
    """Return the matched rows of two results, unmatched counts, and differing conditions.

    Rows of two models match where each result holds one; that they are two is then a condition.
    """
    old_models = models_of(before)
    new_models = models_of(after)
    renamed = old_models != new_models and len(old_models) == len(new_models) == 1
    old = _rows_by_identity(before, ignore_model=renamed)
    new = _rows_by_identity(after, ignore_model=renamed)
    conditions: list[tuple[str, object, object]] = []
    if renamed:
        conditions.append(("model", old_models[0], new_models[0]))
    old_plan = before["plans"][0] if before["plans"] else {}
    new_plan = after["plans"][0] if after["plans"] else {}
    conditions += [(name, old_plan.get(name), new_plan.get(name)) for name in CONDITIONS]
    return {
        "changes": [
            _speed_change(old[key], row, threshold) for key, row in new.items() if key in old
        ],
        "only_before": len(old.keys() - new.keys()),
        "only_after": len(new.keys() - old.keys()),
        "models": [old_models[0], new_models[0]] if renamed else [],
        "conditions": [
            f"{name} {old_value} → {new_value}"
            for name, old_value, new_value in conditions
            if old_value != new_value
        ],
    }


def models_of(result: Result) -> list[str]:
    """Return the names of the models of a result, the first one first."""
    names = (row.get("model") or result["model"] for row in result["rows"])
    return list(dict.fromkeys(names)) or [result["model"]]


def _rows_by_identity(
    result: Result, *, ignore_model: bool
) -> dict[tuple[object, ...], Mapping[str, Any]]:
    """Return rows by what two must share to be compared: workload, method, real weights or not."""
    settings = result["settings"]
    rows_by_key = dict[tuple[object, ...], Mapping[str, Any]]()
    dummy = any(plan["load"] == "dummy" for plan in result["plans"])
    for row in result["rows"]:
        prompts = frozenset(
            result["prompts"][name] for name in row.get("prompts", result["prompts"])
        )
        model = "" if ignore_model else row.get("model") or result["model"]
        work = (settings["max_tokens"], settings["ignore_eos"], prompts, dummy)
        key = (*work, row["acceptance"], *_field_values({**row, "model": model}, IDENTITY))
        rows_by_key[key] = {**row, "model": row.get("model") or result["model"]}
    return rows_by_key


def _speed_change(
    before: Mapping[str, Any], after: Mapping[str, Any], threshold: float
) -> dict[str, Any]:
    """Return the change of a row's speed.

    It is noise where either run's interval holds the other's median.
    """
    old: Interval = before["tokens_per_second"]
    new: Interval = after["tokens_per_second"]
    old_speed = old["median"]
    new_speed = new["median"]
    is_noise = _may_hold(old, new_speed) or _may_hold(new, old_speed)
    verdict = "faster" if new_speed > old_speed else "slower"
    return {
        **{name: after[name] for name in IDENTITY},
        "before": old_speed,
        "after": new_speed,
        "change": new_speed / old_speed - 1,
        "verdict": "within noise" if is_noise else verdict,
        "regressed": not is_noise and new_speed < (1 - threshold) * old_speed,
    }


def _may_hold(interval: Interval, value: float) -> bool:
    """True if a value lies in an interval, or if that is unknown."""
    low = interval["low"]
    high = interval["high"]
    return low is None or high is None or low <= value <= high


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of a sample does not exceed.

    This is the nearest rank.
    """
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


WINSORIZED = 7
"""Values from which on the extremes of a sample are replaced by their neighbours."""


def repeat_interval(values: Sequence[float]) -> Interval:
    """Return the median of repeated positive measurements, and that of a second run's.

    As JSON: `low` and `high` hold a second run's median with 95 % chance; `half_width` is half of
    that as a share of the median. All three are None where there is one value.

    Student's t on the logarithms: both medians vary, each with pi / 2 times the variance of a mean.
    From WINSORIZED values on the least and the largest count as their neighbours, for one hiccup of
    the machine says little of a median (Tukey & McLaughlin 1963). Raises ValueError for an empty
    sample.
    """
    middle = median(values)
    n = len(values)
    if n < 2:
        return {
            "median": middle,
            "low": None,
            "high": None,
            "values": tuple(values),
            "half_width": None,
        }
    logarithms = sorted(log(value) for value in values)
    is_winsorized = n >= WINSORIZED
    if is_winsorized:
        logarithms[0] = logarithms[1]
        logarithms[-1] = logarithms[-2]
    deviation = stdev(logarithms) / (1 - 2 * is_winsorized / n)
    log_half_width = student_quantile(n - 1 - 2 * is_winsorized) * deviation * sqrt(pi / n)
    low = middle * exp(-log_half_width)
    high = middle * exp(log_half_width)
    share = (high - low) / (2 * middle)
    return {
        "median": middle,
        "low": low,
        "high": high,
        "values": tuple(values),
        "half_width": share,
    }


def student_quantile(degrees: int) -> float:
    """Return the value that Student's t exceeds in 5 % of cases, to 1 %.

    Source: Abramowitz & Stegun 26.7.5, and the exact value at 1.
    """
    series = 1.96 + 2.372 / degrees + 2.822 / degrees**2 + 2.556 / degrees**3 + 1.590 / degrees**4
    return 12.706 if degrees == 1 else series

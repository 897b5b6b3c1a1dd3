"""Lines for the probes that measure speed; see `digest`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Result = Mapping[str, Any]


def _warm_up(result: Result) -> list[str]:
    slowest = max((part["seconds"] for part in result.values()), default=0.0)
    failed = [
        f"{name}: {part.get('error') or part['errors']}"
        for name, part in result.items()
        if len(part) > 1
    ]
    return [f"{len(result)} tasks in {slowest} s", *failed]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _kernel_table(result: Result) -> list[str]:
    lines = [result["columns"]]
    for name, case in result["cases"].items():
        if "error" in case:
            lines.append(f"{name}: {case['error']}")
            continue
        rows = [
            f"{size}: {_number(us, '.1f')} {_number(share, '.2f')} {_number(rival, '.1f')}"
            for size, (us, share, rival) in case["rows"].items()
        ]
        ratios = (
            ["8/1 " + " ".join(f"{r:.3f}" for r in case["8_over_1"])]
            if case.get("8_over_1")
            else []
        )
        lines.append(f"{name}: " + "; ".join(rows + ratios + case.get("notes", [])))
    return lines


def _rounds(name: str, rounds: Result) -> str:
    """Describe a plain setting's rounds in one line."""
    if "error" in rounds:
        return f"{name}: {rounds['error']}"
    share = (
        f", {rounds['share_of_floor']:.3f} of the byte floor" if "share_of_floor" in rounds else ""
    )
    median, tail = rounds["period_us"]
    return (
        f"{name} at {rounds['context']}: {rounds['wall_us']:.0f} us a round{share} (device {median:.0f}, "
        f"p90 {tail:.0f}; idle {rounds['idle_us'][0]:.1f}, p90 {rounds['idle_us'][1]:.1f})"
    )


def _several(results: Result) -> Iterator[str]:
    """Describe the rounds of a mapping, or its error."""
    if "error" in results:
        yield str(results["error"])
    for name, result in results.items():
        if isinstance(result, dict) and ("wall_us" in result or "error" in result):
            yield _rounds(name, result)


def _bytes(name: str, result: Result) -> Iterator[str]:
    """Describe the bytes that a round must read, by part."""
    if "bytes" in result:
        parts = ", ".join(f"{part} {nbytes / 1e9:.3f}" for part, nbytes in result["bytes"].items())
        yield f"{name} reads {sum(result['bytes'].values()) / 1e9:.3f} GB a round: {parts}"


def _first_token(result: Result) -> Iterator[str]:
    if "first_token" in result:
        first_token = result["first_token"]
        yield (
            f"first token after a prompt of {first_token['prompt']}: {first_token['cold_ms']:.0f} ms cold "
            f"({first_token['kernels_compiled']} kernels compiled; "
            f"loading {first_token['load_ms']:.0f} ms apart), "
            f"{first_token['warm_ms']:.1f} ms warm"
        )


def _gaps(name: str, pair: Result) -> Iterator[str]:
    """Describe the gaps between one request's tokens by the host's clock, sync and async."""
    for way, gap in pair.get("gaps", {}).items():
        if "error" in gap:
            yield f"{name} k=4 {way}: {gap['error']}"
            continue
        yield (
            f"{name} k=4 {way} (lag {gap['lag']}): acceptance {gap['acceptance_rate']:.3f}, "
            f"length {gap['acceptance_length']:.2f}, ITL p50 {gap['itl_ms'][0]:.2f} "
            f"p99 {gap['itl_ms'][1]:.2f} ms, TPOT {gap['tpot_ms']:.2f} ms"
        )


def _host_reads(counts: Result) -> list[str]:
    if "host_reads" not in counts:
        return []
    reads = counts["host_reads"]
    return [
        f"host reads: {reads['syncs']} in {reads['rounds']} rounds {' '.join(reads['lines'])}".rstrip()
    ]


def _plain(result: Result) -> list[str]:
    sampling = result.get("sampling", {})
    lines = [f"read {result['read_bytes_per_second'] / 1e12:.2f} TB/s", *_several(result["models"])]
    lines += [line for name, model in result["models"].items() for line in _bytes(name, model)]
    for part in (sampling, result.get("contexts", {})):
        lines += _several(part)
    return [*lines, *_first_token(result), *_host_reads(sampling)]


def _draft(result: Result) -> list[str]:
    lines = []
    for name, pair in result["pairs"].items():
        lines += [f"{name}: {pair['error']}"] if "error" in pair else []
        lines += [f"{name} plain: {_rounds('', pair['plain'])}"] if "plain" in pair else []
        for k, rounds in sorted(pair.get("k", {}).items()):
            lines.append(
                f"{name} k={k}: {rounds['error']}"
                if "error" in rounds
                else f"{name} k={k}: {rounds['wall_us']:.0f} us, {pair['acceptance']} {rounds['length']:.2f} "
                f"(counted {rounds['tokens_a_round']:.2f}): {rounds['speedup']:.2f} x, "
                f"{rounds['share_of_ceiling']:.3f} of the ceiling, efficiency {rounds['efficiency']:.3f}, "
                f"verify/plain {rounds['verify_over_plain']:.3f}, idle {rounds['idle_us'][0]:.1f} us"
            )
        lines += _gaps(name, pair)
        lines += _bytes(f"{name} k=4", pair.get("k", {}).get("4", {}))
        lines += [f"{name} {line}" for line in _host_reads(pair)]
    return lines


def _batches(result: Result) -> list[str]:
    lines = []
    for name, case in result["cases"].items():
        if "error" in case:
            lines.append(f"{name}: {case['error']}")
            continue
        parts = []
        for key, value in case.items():
            if "_over_" in key:
                within = ""
                if value["interval_95"]:
                    low, high = value["interval_95"]
                    within = f"{low:.3f} to {high:.3f}, "
                parts.append(f"{key} {value['median']:.3f} ({within}n={value['turns']})")
            elif isinstance(value, dict) and "round_us" in value:
                parts.append(
                    f"{key} {value['round_us']:.0f} us {value['expected_tokens_a_second']:.0f} tokens/s"
                )
        groups = case.get("side_by_side", [])
        if len(groups) > 1:
            parts.append(
                "no room for all at once: "
                + ", then ".join(" beside ".join(value) for value in groups)
            )
        lines.append(f"{name}: " + "; ".join(parts))
    return lines


def _contest(result: Result) -> list[str]:
    """Describe speeds and ratios of one interleaved run, or only errors where nothing ran."""
    errors = [f"{name}: {error}" for name, error in result["errors"].items()]
    if "tokens_a_second" not in result:
        return errors
    speeds = [
        f"{name} {summary['median']:.1f}" for name, summary in result["tokens_a_second"].items()
    ]
    ratios = [
        f"{name} = {summary['median']:.2f} ({summary['low']:.2f} to {summary['high']:.2f})"
        for name, summary in result["ratios"].items()
    ]
    return ["tokens/s: " + ", ".join(speeds), *ratios, *errors]


def _contests(result: Result) -> list[str]:
    return [line for contest in result.values() for line in _contest(contest)]


EQUAL = "equal"
"""The size whose figure is 1 where a row has the same bits alone and among others, else 0."""


def fastest(case: Result) -> dict[str, tuple[str, float, float]]:
    """Return by size the fastest alternative that keeps a row's bits, its time, and that of what is
    built."""
    times: dict[str, dict[str, float]] = {}
    for name, measured in case.items():
        rows = measured.get("rows", {})
        if rows.get(EQUAL, [1.0])[0]:
            for size in rows.keys() - {EQUAL}:
                times.setdefault(size, {})[name] = rows[size][0]
    best: dict[str, tuple[str, float, float]] = {}
    for size in sorted(times):
        name = min(times[size], key=times[size].__getitem__)
        best[size] = (name, times[size][name], times[size].get("as built", math.nan))
    return best


def _choices(result: Result) -> list[str]:
    lines = []
    for name, case in result["cases"].items():
        parts = [
            f"{size}: {us:.1f} us {alternative} (as built {built:.1f})"
            for size, (alternative, us, built) in fastest(case).items()
        ]
        errors = [
            f"{alternative}: {rows['error']}"
            for alternative, rows in case.items()
            if "error" in rows
        ]
        lines.append(f"{name}: " + "; ".join(parts + errors))
    return lines


def _timeline(result: Result) -> list[str]:
    lines = []
    for name, trace in result["models"].items():
        if "error" in trace:
            lines.append(f"{name}: {trace['error']}")
            continue
        lines.append(
            f"{name}: {trace['launches']:.0f} kernels a round, {trace['busy_us']:.0f} us in them, "
            f"{trace['idle_us']:.0f} us between them"
        )
        for kernel, times in trace["kernels"].items():
            lines.append(
                f"{name} {kernel}: {times['launches']:.0f} x {times['us']:.1f} us, "
                f"{_number(times['gap_us'], '.1f')} us after the one before"
            )
    return lines


def _missing(result: Result) -> list[str]:
    return [f"{result['missing']} is not installed"] if "missing" in result else []


def _clocks(result: Result) -> list[str]:
    spans = [
        f"{name} {' '.join(f'{value:.0f}' for value in span)}"
        for name, span in result.items()
        if isinstance(span, list)
    ]
    samples = [f"lowest, median, highest: {', '.join(spans)}"] if spans else []
    return _missing(result) + samples


def _ncu(result: Result) -> list[str]:
    launches = [
        f"{launch['kernel']}: "
        + ", ".join(f"{name} {value:.1f}" for name, value in launch.items() if name != "kernel")
        for launch in result.get("launches", [])
    ]
    return _missing(result) + launches


def _sanitizer(result: Result) -> list[str]:
    counts = [
        f"{name}: {_number(answer['errors'], 'd')} errors, pytest ended with {answer['status']}"
        for name, answer in result.get("tools", {}).items()
    ]
    return _missing(result) + counts


RENDERERS: Mapping[str, Callable[[Result], list[str]]] = {
    "warm_up": _warm_up,
    "kernel_table": _kernel_table,
    "recurrent_table": _kernel_table,
    "sweep": _choices,
    "attention_ab": _choices,
    "barrier": _choices,
    "recurrent_ab": _choices,
    "overlap_ab": _choices,
    "timeline": _timeline,
    "clocks": _clocks,
    "ncu": _ncu,
    "sanitizer": _sanitizer,
    "plain": _plain,
    "draft": _draft,
    "eagle3": _draft,
    "batches": _batches,
    "peers_eager": _contests,
    "peers_loop": _contests,
    "peers_static": _contests,
}

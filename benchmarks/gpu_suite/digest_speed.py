"""Lines for the probes that measure speed; see `digest`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Result = Mapping[str, Any]


def _warm_up(result: Result) -> list[str]:
    slowest = max((one["seconds"] for one in result.values()), default=0.0)
    failed = [
        f"{name}: {one.get('error') or one['errors']}"
        for name, one in result.items()
        if len(one) > 1
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


def _rounds(name: str, one: Result) -> str:
    """A plain setting's rounds in one line."""
    if "error" in one:
        return f"{name}: {one['error']}"
    share = f", {one['share_of_floor']:.3f} of the byte floor" if "share_of_floor" in one else ""
    median, tail = one["period_us"]
    return (
        f"{name} at {one['context']}: {one['wall_us']:.0f} us a round{share} (device {median:.0f}, "
        f"p90 {tail:.0f}; idle {one['idle_us'][0]:.1f}, p90 {one['idle_us'][1]:.1f})"
    )


def _several(results: Result) -> Iterator[str]:
    """The rounds in a mapping that may be an error as a whole."""
    if "error" in results:
        yield str(results["error"])
    for name, one in results.items():
        if isinstance(one, dict) and ("wall_us" in one or "error" in one):
            yield _rounds(name, one)


def _bytes(name: str, one: Result) -> Iterator[str]:
    """What a round must read, by part."""
    if "bytes" in one:
        parts = ", ".join(f"{part} {nbytes / 1e9:.3f}" for part, nbytes in one["bytes"].items())
        yield f"{name} reads {sum(one['bytes'].values()) / 1e9:.3f} GB a round: {parts}"


def _first_token(result: Result) -> Iterator[str]:
    if "first_token" in result:
        one = result["first_token"]
        yield (
            f"first token after a prompt of {one['prompt']}: {one['cold_ms']:.0f} ms cold "
            f"({one['kernels_compiled']} kernels compiled; loading {one['load_ms']:.0f} ms apart), "
            f"{one['warm_ms']:.1f} ms warm"
        )


def _gaps(name: str, pair: Result) -> Iterator[str]:
    """Tokens of one request by the host's clock, sync beside async."""
    for way, one in pair.get("gaps", {}).items():
        if "error" in one:
            yield f"{name} k=4 {way}: {one['error']}"
            continue
        yield (
            f"{name} k=4 {way} (lag {one['lag']}): acceptance {one['acceptance_rate']:.3f}, "
            f"length {one['acceptance_length']:.2f}, ITL p50 {one['itl_ms'][0]:.2f} "
            f"p99 {one['itl_ms'][1]:.2f} ms, TPOT {one['tpot_ms']:.2f} ms"
        )


def _host_reads(one: Result) -> list[str]:
    if "host_reads" not in one:
        return []
    reads = one["host_reads"]
    return [
        f"host reads: {reads['syncs']} in {reads['rounds']} rounds {' '.join(reads['lines'])}".rstrip()
    ]


def _plain(result: Result) -> list[str]:
    sampling = result.get("sampling", {})
    lines = [f"read {result['read_bytes_per_second'] / 1e12:.2f} TB/s", *_several(result["models"])]
    lines += [line for name, one in result["models"].items() for line in _bytes(name, one)]
    for part in (sampling, result.get("contexts", {})):
        lines += _several(part)
    return [*lines, *_first_token(result), *_host_reads(sampling)]


def _draft(result: Result) -> list[str]:
    lines = []
    for name, pair in result["pairs"].items():
        lines += [f"{name}: {pair['error']}"] if "error" in pair else []
        lines += [f"{name} plain: {_rounds('', pair['plain'])}"] if "plain" in pair else []
        for k, one in sorted(pair.get("k", {}).items()):
            lines.append(
                f"{name} k={k}: {one['error']}"
                if "error" in one
                else f"{name} k={k}: {one['wall_us']:.0f} us, {pair['acceptance']} {one['length']:.2f} "
                f"(counted {one['tokens_a_round']:.2f}): {one['speedup']:.2f} x, "
                f"{one['share_of_ceiling']:.3f} of the ceiling, efficiency {one['efficiency']:.3f}, "
                f"verify/plain {one['verify_over_plain']:.3f}, idle {one['idle_us'][0]:.1f} us"
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
        for key, one in case.items():
            if "_over_" in key:
                within = (
                    "{:.3f} to {:.3f}, ".format(*one["interval_95"]) if one["interval_95"] else ""
                )
                parts.append(f"{key} {one['median']:.3f} ({within}n={one['turns']})")
            elif isinstance(one, dict) and "round_us" in one:
                parts.append(
                    f"{key} {one['round_us']:.0f} us {one['expected_tokens_a_second']:.0f} tokens/s"
                )
        groups = case.get("side_by_side", [])
        if len(groups) > 1:
            parts.append(
                "no room for all at once: " + ", then ".join(" beside ".join(one) for one in groups)
            )
        lines.append(f"{name}: " + "; ".join(parts))
    return lines


def _contest(result: Result) -> list[str]:
    """Speeds and ratios of one interleaved run; only errors where nothing ran."""
    errors = [f"{name}: {error}" for name, error in result["errors"].items()]
    if "tokens_a_second" not in result:
        return errors
    speeds = [f"{name} {one['median']:.1f}" for name, one in result["tokens_a_second"].items()]
    ratios = [
        f"{name} = {one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
        for name, one in result["ratios"].items()
    ]
    return ["tokens/s: " + ", ".join(speeds), *ratios, *errors]


def _contests(result: Result) -> list[str]:
    return [line for contest in result.values() for line in _contest(contest)]


RENDERERS: Mapping[str, Callable[[Result], list[str]]] = {
    "warm_up": _warm_up,
    "kernel_table": _kernel_table,
    "recurrent_table": _kernel_table,
    "plain": _plain,
    "draft": _draft,
    "eagle3": _draft,
    "batches": _batches,
    "peers_eager": _contests,
    "peers_loop": _contests,
    "peers_static": _contests,
}

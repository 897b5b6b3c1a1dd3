"""The few lines a person reads first; the report holds everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu_suite import digest_speed as speed
from benchmarks.gpu_suite.gates import gate_lines


def digest(report: Mapping[str, Any]) -> str:
    """Return one or a few lines a probe, also of one that was stopped early, and then the gates."""
    lines = []
    for name, probe in report["probes"].items():
        if probe["status"] != "ok":
            words = (probe.get("error") or probe.get("log") or [probe.get("why", "")])[-1:]
            lines.append(f"{name}: {probe['status']} {' '.join(words)}")
        if name in RENDERERS and "result" in probe:
            lines += [f"{name}: {line}" for line in RENDERERS[name](probe["result"])]
    return "\n".join([*lines, *gate_lines(report["probes"])])


def _device(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{result['name']}, driver {result['driver']}, torch {result['torch']}, triton {result['triton']}"
    ]


def _bandwidth(result: Mapping[str, Any]) -> list[str]:
    rates = ", ".join(
        f"{name} {one['bytes_per_second'] / 1e12:.2f}" for name, one in result.items()
    )
    return [f"TB/s: {rates}"]


def _gemm(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for case in result["equality"]:
        for one in case["triton"]:
            bad = {
                tile: found
                for tile, found in one["tiles"].items()
                if not found["equal_to_tile_16"]
                or found["rows_that_differ"]
                or found["positions_that_differ"]
            }
            shape = f"{case['dtype']} N {case['n']} K {case['k']}"
            config = f"{one['config']['block_n']}x{one['config']['block_k']}"
            lines.append(
                f"{shape} triton {config}: "
                + ("all equal" if not bad else f"DIFFER at tiles {list(bad)}")
            )
        lines.append(f"{shape} F.linear differs at rows {case['linear_rows_that_differ']}")
    for case in result["speed"]:
        best = max(case["share_of_read_rate"], key=case["share_of_read_rate"].get)
        shares = case["share_of_read_rate"]
        lines.append(
            f"N {case['n']} K {case['k']} rows {case['rows']}: linear {shares['linear']:.2f}, "
            f"best {best} {shares[best]:.2f} of the read rate"
        )
    return lines


def _graph(result: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {one['us_per_node']:.2f} us a node" for name, one in result.items()]


def _sdpa(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {one['refused']}"
        if "refused" in one
        else f"{name}: {one['differing']} of {one['cases']} differ"
        for name, one in result.items()
    ]


def _spd(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['differing_tokens']} of {result['compared_tokens']} tokens changed; "
        f"{result['differing_counts']} requests drafted or accepted otherwise"
    ]
    for name, row in result["settings"].items():
        lines.append(
            f"{name}: {row['error']}"
            if "error" in row
            else f"{name}: {row['differing_tokens']} of {row['tokens']} tokens differ, "
            f"{row['other_counts']} of {row['requests']} counts, {row['rejected']} drafts rejected, "
            f"acceptance length {row['acceptance_length']:.2f}, {row['tokens_per_second']:.0f} tokens/s"
            + (
                f", TPOT {row['tpot_ms']:.2f} ms, ITL {row['itl_ms']:.2f} ms"
                if "tpot_ms" in row
                else ""
            )
        )
    return lines


def _forms(result: Mapping[str, Any]) -> list[str]:
    return [f"{form}: {line}" for form, found in result["forms"].items() for line in _spd(found)]


def _sparse(result: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, rows in result["models"].items():
        for k, row in rows.items():
            cut = row.get("layers") != row.get("of")
            label = f"{name} in {row['layers']} layers {k}" if cut else f"{name} {k}"
            lines.append(
                f"{label}: {row['error']}"
                if "error" in row
                else f"{label}: {row['wall_us']:.0f} us, {row['share_of_floor']:.2f} of the byte floor, "
                f"weights {row['weights']}, {row['touched_experts']:.1f} experts a layer"
            )
    return lines


def _tests(result: Mapping[str, Any]) -> list[str]:
    failed = result["failed"]
    counts = f"{result['passed']} passed, {len(failed)} failed, {result['skipped']} skipped"
    return [f"{counts}, {result['files']} of {result['of']} files", *failed]


RENDERERS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "device": _device,
    "bandwidth": _bandwidth,
    "gemm_equality": _gemm,
    "token_tiles": lambda result: [
        ", ".join(f"{kind} {tile}" for kind, tile in result["widest"].items())
    ],
    "graph_nodes": _graph,
    "sdpa_equality": _sdpa,
    "spd_demo": _spd,
    "spd_medium": _spd,
    "self_draft": _spd,
    "self_draft_long": _spd,
    "gpu_tests": _tests,
    "eight_bit_rounds": _forms,
    "sparse_models": _sparse,
    **speed.RENDERERS,
}

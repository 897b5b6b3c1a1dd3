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
        f"{name} {rate['bytes_per_second'] / 1e12:.2f}" for name, rate in result.items()
    )
    return [f"TB/s: {rates}"]


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
    return [
        f"{form}: {line}"
        for form, form_result in result["forms"].items()
        for line in _spd(form_result)
    ]


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
    "token_tiles": lambda result: [
        ", ".join(f"{kind} {tile}" for kind, tile in result["widest"].items())
    ],
    "spd_demo": _spd,
    "spd_medium": _spd,
    "self_draft": _spd,
    "self_draft_long": _spd,
    "gpu_tests": _tests,
    "eight_bit_rounds": _forms,
    "sparse_models": _sparse,
    **speed.RENDERERS,
}

"""What the kernels and rounds of sparse and eight-bit models have to reach, against a report's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Figures = Sequence[float]
MANY_EXPERTS = ("experts Qwen3-30B-A3B", "experts GLM-4.5-Air")
"""Cases with 128 experts, eight for each token."""
FEW_ROWS = ("1", "4", "8")
ENOUGH_TOKENS = 100_000


@dataclass(frozen=True)
class Gate:
    """A figure that must be at least `least`, and better `goal`: the lowest of all that a probe found.

    Where `zero`, the figures are counts that must be none instead.
    """

    name: str
    probe: str
    figures: Callable[[Mapping[str, Any]], Figures]
    least: float = 0.0
    goal: float | None = None
    zero: bool = False

    def line(self, result: Mapping[str, Any]) -> str:
        """The gate, what was found and whether it is met, in words."""
        found = self.figures(result)
        wanted = "none" if self.zero else f"at least {self.least:g}"
        wanted += "" if self.goal is None else f", goal {self.goal:g}"
        if not found:
            return f"gate: {self.name} ({wanted}): not measured"
        worst = max(found) if self.zero else min(found)
        met = worst == 0 if self.zero else worst >= self.least
        shown = f"{worst:.0f}" if self.zero or worst >= 1000 else f"{worst:.2f}"
        return f"gate: {self.name} ({wanted}): {shown}, {'met' if met else 'NOT met'}"


def _rows(
    result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]
) -> Iterator[Sequence[float | None]]:
    """Time, share of the read rate and rival's time of cases whose names begin so, at these sizes."""
    for name, case in result["cases"].items():
        if name.startswith(tuple(beginnings)):
            yield from (case["rows"][size] for size in sizes if size in case.get("rows", {}))


def _shares(result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]) -> Figures:
    return [share for _, share, _ in _rows(result, beginnings, sizes) if share is not None]


def _against_wide(result: Mapping[str, Any], kind: str) -> Figures:
    rows = _rows(result, [f"{kind} "], FEW_ROWS)
    return [rival / us for us, _, rival in rows if us is not None and rival is not None]


def _ceiling(result: Mapping[str, Any], k: int) -> Figures:
    """A round's floor counts its drafts, so its share is that of the speculative byte ceiling."""
    row = result["models"].get("MiMo-7B", {}).get(f"k={k}", {})
    return [row["share_of_floor"]] if "share_of_floor" in row else []


def _of_forms(result: Mapping[str, Any], field: str) -> Figures:
    return [found[field] for found in result["forms"].values() if field in found]


def _gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    yield table(
        "latent attention at one query, of the read rate",
        figures=partial(_shares, beginnings=["mla "], sizes=["1"]),
        least=0.65,
        goal=0.78,
    )
    for words, sizes, least in (("1", ["1"], 0.5), ("8", ["8"], 0.75), ("16 and more", ["16", "64"], 0.85)):
        figures = partial(_shares, beginnings=MANY_EXPERTS, sizes=sizes)
        yield table(f"128 experts at {words} rows, of the touched bytes", figures=figures, least=least)
    for kind in ("int8", "fp8"):
        shares = partial(_shares, beginnings=[f"{kind} "], sizes=FEW_ROWS)
        yield table(f"{kind} products up to 8 rows, of the read rate", figures=shares, least=0.8, goal=0.88)
        ratio = partial(_against_wide, kind=kind)
        yield table(f"{kind} products against wide ones", figures=ratio, least=1.6, goal=1.85)
    for k in (1, 3):
        name = f"MTP at a 7B shape, k = {k}, of the speculative byte ceiling"
        yield Gate(name, "sparse_models", partial(_ceiling, k=k), least=0.75)
    forms = partial(Gate, probe="eight_bit_rounds")
    yield forms(
        "tokens that speculation changed", figures=partial(_of_forms, field="differing_tokens"), zero=True
    )
    yield forms("tokens compared", figures=partial(_of_forms, field="compared_tokens"), least=ENOUGH_TOKENS)
    yield forms(
        "requests that accepted otherwise, eager or captured, at any lag",
        figures=partial(_of_forms, field="differing_counts"),
        zero=True,
    )


GATES = tuple(_gates())


def gate_lines(probes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each gate whose probe was run, also where the probe found nothing for it."""
    return [
        gate.line(probes[gate.probe]["result"])
        if "result" in probes[gate.probe]
        else f"gate: {gate.name}: not measured"
        for gate in GATES
        if gate.probe in probes
    ]

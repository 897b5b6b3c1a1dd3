"""What kernels and rounds have to reach, against a report's figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Figures = Sequence[float]
EXPERT_CASES = ("experts Qwen3-30B-A3B", "experts GLM-4.5-Air")
"""Cases with 128 experts, eight for each token."""
DECODE_ROWS = ("1", "4", "8")
RECURRENT = ("Qwen3.5-27B", "Qwen3.5-35B-A3B")
MIN_TOKENS = 100_000
MIN_TOKENS_8B = 8_000


@dataclass(frozen=True)
class Gate:
    """A figure that must be at least `minimum`, and better `goal`: the lowest that a probe measured.

    With `maximum`, the largest of them must be no more than that instead. A `reported` gate requires
    nothing: its figure is only reported, also where its probe, which is no default one, did not run.
    """

    name: str
    probe: str
    figures: Callable[[Mapping[str, Any]], Figures]
    minimum: float = 0.0
    goal: float | None = None
    maximum: float | None = None
    reported: bool = False

    def judge(self, result: Mapping[str, Any] | None) -> Verdict:
        """Return the verdict of a probe's result, or of None without one."""
        figures = [] if result is None else self.figures(result)
        if not figures:
            return Verdict(self, None, False)
        deciding = min(figures) if self.maximum is None else max(figures)
        is_met = deciding >= self.minimum if self.maximum is None else deciding <= self.maximum
        return Verdict(self, deciding, is_met or self.reported)


@dataclass(frozen=True)
class Verdict:
    """A gate, the figure that decides, None where none was found, and whether it is met."""

    gate: Gate
    figure: float | None
    met: bool

    def line(self) -> str:
        """Return the gate, its figure and whether it is met as a line of text."""
        gate = self.gate
        figure = self.figure
        if gate.reported:
            return f"gate: {gate.name} (reported): {'not measured' if figure is None else f'{figure:.2f}'}"
        requirement = (
            f"at least {gate.minimum:g}" if gate.maximum is None else f"at most {gate.maximum:g}"
        )
        requirement = "none" if gate.maximum == 0 else requirement
        requirement += "" if gate.goal is None else f", goal {gate.goal:g}"
        if figure is None:
            return f"gate: {gate.name} ({requirement}): not measured"
        display_text = f"{figure:.0f}" if gate.maximum == 0 or figure >= 1000 else f"{figure:.2f}"
        return (
            f"gate: {gate.name} ({requirement}): {display_text}, {'met' if self.met else 'NOT met'}"
        )


def _rows(
    result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]
) -> Iterator[Sequence[float | None]]:
    """Yield time, share of the read rate and rival's time of cases by the beginnings of their
    names."""
    for name, case in result["cases"].items():
        if name.startswith(tuple(beginnings)):
            yield from (case["rows"][size] for size in sizes if size in case.get("rows", {}))


def _shares(result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]) -> Figures:
    return [share for _, share, _ in _rows(result, beginnings, sizes) if share is not None]


def _times(result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]) -> Figures:
    return [us for us, _, _ in _rows(result, beginnings, sizes) if us is not None]


def _chunk_rates(result: Mapping[str, Any], part: str) -> Figures:
    return [1e-6 * rate for rate in _shares(result, ["delta_chunks "], [part])]


def _against_wide(
    result: Mapping[str, Any], beginning: str, sizes: Sequence[str] = DECODE_ROWS
) -> Figures:
    rows = _rows(result, [beginning], sizes)
    return [rival / us for us, _, rival in rows if us is not None and rival is not None]


def _ceiling(result: Mapping[str, Any], k: int) -> Figures:
    """Return a round's share of the speculative byte ceiling: its floor counts its drafts."""
    row = result["models"].get("MiMo-7B", {}).get(f"k={k}", {})
    return [row["share_of_floor"]] if "share_of_floor" in row else []


def _of_forms(result: Mapping[str, Any], field: str) -> Figures:
    return [form[field] for form in result["forms"].values() if field in form]


LARGE_BYTES = 64e6
"""Of weights, or of keys and values: less is read in the time that a launch takes."""
VERY_LARGE_BYTES = 100e6
"""Of weights: a launch takes a tenth of the time in which they are read."""
SIZES = re.compile(r" (qkv|out|gate_up|down|head) (\d+)x(\d+)$")
BYTE_SIZES = re.compile(r"(int8|fp8) (\d+)x(\d+)$")


def _large_products(
    result: Mapping[str, Any], least: float, below: float = math.inf
) -> Iterator[Mapping[str, Any]]:
    """Yield the cases of 16-bit weights of `least` bytes and more, and fewer than `below`."""
    for name, case in result["cases"].items():
        match = SIZES.search(name)
        if match and least <= 2 * int(match[2]) * int(match[3]) < below and "rows" in case:
            yield case


def _large_shares(result: Mapping[str, Any], least: float, below: float = math.inf) -> Figures:
    cases = _large_products(result, least, below)
    rows = [row for case in cases for row in case["rows"].values()]
    return [share for _, share, _ in rows if share is not None]


def _eight_over_one(result: Mapping[str, Any]) -> Figures:
    cases = _large_products(result, LARGE_BYTES)
    return [case["8_over_1"][0] for case in cases if case.get("8_over_1")]


def _byte_shares(
    result: Mapping[str, Any], kind: str, least: float, below: float = math.inf
) -> Figures:
    """Return the shares of weights in eight bits, of `least` bytes and more, fewer than `below`."""
    matches = filter(None, map(BYTE_SIZES.match, result["cases"]))
    names = [
        match[0]
        for match in matches
        if match[1] == kind and least <= int(match[2]) * int(match[3]) < below
    ]
    return _shares(result, names, DECODE_ROWS) if names else []


def _plain(result: Mapping[str, Any], field: str, model: str = "Qwen3-8B") -> Figures:
    value = result["models"].get(model, {}).get(field)
    return [] if value is None else [value] if isinstance(value, float | int) else value[:1]


def _pair(result: Mapping[str, Any], name: str, field: str) -> Figures:
    row = result["pairs"].get(name, {}).get("k", {}).get("4", {})
    return [row[field]] if field in row else []


def _host_reads(result: Mapping[str, Any]) -> Figures:
    parts = [result.get("sampling", {}), *result.get("pairs", {}).values()]
    return [part["host_reads"]["syncs"] for part in parts if "host_reads" in part]


def _ratios(result: Mapping[str, Any], peers: Sequence[str]) -> Figures:
    """Return plain decoding's ratio to each of the peers that ran, in any contest."""
    names = [f"spd plain / {peer}" for peer in peers]
    ratios = [contest.get("ratios", {}) for contest in result.values()]
    return [
        contest_ratios[name]["median"]
        for contest_ratios in ratios
        for name in names
        if name in contest_ratios
    ]


def _tests(result: Mapping[str, Any]) -> Figures:
    """Return the failed tests and unfinished files, or nothing if no test ran."""
    return [len(result["failed"]) + result["of"] - result["files"]] if result["passed"] else []


def _attention_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    for words, cases, minimum, goal in (
        ("16 slots at 1024", ["16 slots 1024"], 0.6, 0.65),
        ("16 slots at 4096 and one at 32768", ["16 slots 4096", "1 slots 32768"], 0.75, 0.8),
        ("16 slots at 32768", ["16 slots 32768"], 0.85, 0.89),
    ):
        names = [f"paged_attention {case}" for case in cases]
        yield table(
            f"decode attention of {words}, of the read rate",
            figures=partial(_shares, beginnings=names, sizes=["1", "5"]),
            minimum=minimum,
            goal=goal,
        )
    ratio = partial(_against_wide, beginning="paged_attention in int8 16 slots 4096", sizes=["1"])
    yield table(
        "decode attention in int8 against 16 bits, 16 slots at 4096",
        figures=ratio,
        minimum=1.6,
        goal=1.8,
    )


def _dense_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    yield table(
        "products of 100 MB and more, of the read rate",
        figures=partial(_large_shares, least=VERY_LARGE_BYTES),
        minimum=0.9,
        goal=0.95,
    )
    yield table(
        "products of 64 to 100 MB, of the read rate",
        figures=partial(_large_shares, least=LARGE_BYTES, below=VERY_LARGE_BYTES),
        minimum=0.86,
        goal=0.9,
    )
    yield table("their time at 8 rows over that at 1", figures=_eight_over_one, maximum=1.05)
    yield from _attention_gates()
    plain = partial(Gate, probe="plain")
    share = partial(_plain, field="share_of_floor")
    yield plain("8B plain at batch 1, of the byte floor", figures=share, minimum=0.78, goal=0.87)
    yield plain("us between rounds", figures=partial(_plain, field="idle_us"), maximum=30, goal=10)
    yield plain("host reads in rounds", figures=_host_reads, maximum=0)
    pairs = partial(Gate, probe="draft")
    yield pairs("host reads in rounds with drafts", figures=_host_reads, maximum=0)
    eagle = "EAGLE-size > Qwen3-8B"
    small = "Qwen3-0.6B > Qwen3-8B"
    ceiling = partial(_pair, name=eagle, field="share_of_ceiling")
    yield pairs(
        "EAGLE-size drafter, k = 4, of the byte ceiling", figures=ceiling, minimum=0.69, goal=0.83
    )
    speed = partial(_pair, name=eagle, field="speedup")
    yield pairs("the same over plain, length 3.08", figures=speed, minimum=2.2, goal=2.4)
    ceiling = partial(_pair, name=small, field="share_of_ceiling")
    yield pairs("0.6B drafter, k = 4, of the byte ceiling", figures=ceiling, minimum=0.6)
    heads = partial(Gate, probe="eagle3")
    ceiling = partial(_pair, name="EAGLE-3 > Qwen3-8B", field="share_of_ceiling")
    yield heads(
        "EAGLE-3 head of 8B, k = 4, of the byte ceiling", figures=ceiling, minimum=0.69, goal=0.83
    )
    speed = partial(_pair, name="EAGLE-3 > Qwen3-8B", field="speedup")
    yield heads("EAGLE-3 head of 8B over plain, length 3.08", figures=speed, minimum=2.2, goal=2.4)
    eager = partial(_ratios, peers=["transformers eager"])
    yield Gate("8B over eager transformers", "peers_eager", eager, minimum=4)
    loop = partial(_ratios, peers=["compiled loop", "tuned compiled loop"])
    yield Gate("8B over a compiled loop", "peers_loop", loop, minimum=1.25)
    static = partial(_ratios, peers=["transformers static compiled"])
    yield Gate("8B over compiled transformers", "peers_static", static, reported=True)


def _equality_gates() -> Iterator[Gate]:
    """Yield the gates of texts that speculation must not change, and of the GPU tests."""
    texts = (
        ("spd_demo", "the demo's", MIN_TOKENS),
        ("self_draft", "the 8B shape's", MIN_TOKENS_8B),
        ("self_draft_long", "of many k, the 8B shape's", MIN_TOKENS),
    )
    for probe, whose, enough in texts:
        changed = "tokens that speculation changed"
        otherwise = "requests that accepted otherwise"
        yield Gate(
            f"{whose} {changed}", probe, lambda result: [result["differing_tokens"]], maximum=0
        )
        yield Gate(
            f"{whose} {otherwise}", probe, lambda result: [result["differing_counts"]], maximum=0
        )
        yield Gate(
            f"{whose} tokens compared",
            probe,
            lambda result: [result["compared_tokens"]],
            minimum=enough,
        )
    yield Gate(
        "GPU tests that failed, and files of them that did not end", "gpu_tests", _tests, maximum=0
    )


def _few_bits_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    # An H200 reads bytes faster than it unpacks them; on other cards all goals are 0.8.
    for words, kind, least, below, minimum, goal in (
        ("int8 products of 64 MB and more", "int8", LARGE_BYTES, math.inf, 0.8, 0.88),
        ("int8 products of less than 64 MB", "int8", 0, LARGE_BYTES, 0.74, 0.8),
        ("fp8 products", "fp8", 0, math.inf, 0.65, 0.8),
    ):
        yield table(
            f"{words} up to 8 rows, of the read rate",
            figures=partial(_byte_shares, kind=kind, least=least, below=below),
            minimum=minimum,
            goal=goal,
        )
    for kind in ("int8", "fp8"):
        ratio = partial(_against_wide, beginning=f"{kind} ")
        yield table(f"{kind} products against wide ones", figures=ratio, minimum=1.6, goal=1.85)
    shares = partial(_shares, beginnings=["int4 "], sizes=DECODE_ROWS)
    # An H200 reads four bits faster than it unpacks them; on consumer cards the goal is 0.75.
    yield table(
        "int4 products up to 8 rows, of the read rate", figures=shares, minimum=0.4, goal=0.75
    )


def _sparse_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    # 16 slots alone: the latents of one are read in the time that the launches take (see
    # LARGE_BYTES).
    yield table(
        "latent attention of 16 slots at one query, of the read rate",
        figures=partial(
            _shares, beginnings=["mla V3 16 slots", "mla V2-Lite 16 slots"], sizes=["1"]
        ),
        minimum=0.65,
        goal=0.78,
    )
    for words, sizes, minimum in (
        ("1", ["1"], 0.5),
        ("8", ["8"], 0.75),
        ("16 and more", ["16", "64"], 0.85),
    ):
        figures = partial(_shares, beginnings=EXPERT_CASES, sizes=sizes)
        yield table(
            f"128 experts at {words} rows, of the touched bytes", figures=figures, minimum=minimum
        )
    yield from _few_bits_gates()
    shares = partial(_shares, beginnings=["GGUF "], sizes=DECODE_ROWS)
    yield table(
        "GGUF's types up to 8 rows, of the read rate", figures=shares, minimum=0.4, goal=0.75
    )
    for k in (1, 3):
        name = f"MTP at a 7B shape, k = {k}, of the speculative byte ceiling"
        yield Gate(name, "sparse_models", partial(_ceiling, k=k), minimum=0.75)
    forms = partial(Gate, probe="eight_bit_rounds")
    yield forms(
        "tokens that speculation changed",
        figures=partial(_of_forms, field="differing_tokens"),
        maximum=0,
    )
    yield forms(
        "tokens compared", figures=partial(_of_forms, field="compared_tokens"), minimum=MIN_TOKENS
    )
    yield forms(
        "requests that accepted otherwise, eager or captured, at any lag",
        figures=partial(_of_forms, field="differing_counts"),
        maximum=0,
    )


def _recurrent_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="recurrent_table")
    # 16 and 64 slots: the states of fewer are read in the time that a launch takes (see
    # LARGE_BYTES).
    for k in (0, 1, 4, 8):
        large = [f"delta_rule {name} {slots} slots" for name in RECURRENT for slots in (16, 64)]
        figures = partial(_shares, beginnings=large, sizes=[f"k={k}"])
        name = f"states of recurrent layers read and written, k = {k}, of the read rate"
        yield table(name, figures=figures, minimum=0.75, goal=0.85)
    small_cases = [f"short_conv {name} {slots} slots" for name in RECURRENT for slots in (1, 4, 16)]
    times = partial(_times, beginnings=small_cases, sizes=["k=0", "k=4"])
    yield table(
        "short convolutions of up to 16 slots and 5 rows, us", figures=times, maximum=8, goal=5
    )
    for part in ("rule", "convolution"):
        name = f"a prompt's chunks through a recurrent layer's {part}, million tokens a second"
        yield table(name, figures=partial(_chunk_rates, part=part), minimum=2, goal=5)


GATES = (*_dense_gates(), *_equality_gates(), *_sparse_gates(), *_recurrent_gates())


PEERS = {"peers_eager", "peers_loop"}
"""Probes beside whose figures those of compiled transformers are looked for."""


def judge(probes: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Return a verdict for each gate whose probe was to run, also where it has no figure."""
    return [
        gate.judge(probes.get(gate.probe, {}).get("result"))
        for gate in GATES
        if gate.probe in probes or (gate.reported and not PEERS.isdisjoint(probes))
    ]


def gate_lines(probes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the verdicts as lines of text."""
    return [verdict.line() for verdict in judge(probes)]


PASSED = 0
FAILED = 1
NOT_MEASURED = 4
UNFINISHED = ("cut short", "not run")
"""Statuses of probes that did nothing wrong, but had no more time."""


def exit_status(probes: Mapping[str, Mapping[str, Any]]) -> int:
    """Return FAILED if a gate is missed or a probe failed, NOT_MEASURED if anything is
    missing."""
    verdicts = judge(probes)
    statuses = [probe["status"] for probe in probes.values()]
    is_missed = any(verdict.figure is not None and not verdict.met for verdict in verdicts)
    if is_missed or any(status not in ("ok", *UNFINISHED) for status in statuses):
        return FAILED
    required = [verdict for verdict in verdicts if not verdict.gate.reported]
    unfinished = any(verdict.figure is None for verdict in required) or any(
        verdict in UNFINISHED for verdict in statuses
    )
    return NOT_MEASURED if unfinished else PASSED

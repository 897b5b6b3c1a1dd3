"""What kernels and rounds have to reach, against a report's figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Figures = Sequence[float]
MANY_EXPERTS = ("experts Qwen3-30B-A3B", "experts GLM-4.5-Air")
"""Cases with 128 experts, eight for each token."""
FEW_ROWS = ("1", "4", "8")
RECURRENT = ("Qwen3.5-27B", "Qwen3.5-35B-A3B")
ENOUGH_TOKENS = 100_000
A_FEW_TOKENS = 8_000


@dataclass(frozen=True)
class Gate:
    """A figure that must be at least `least`, and better `goal`: the lowest of all that a probe found.

    With `most`, the largest of them must be no more than that instead. One that is `reported` asks for
    nothing: it is said with what was found, also where its probe, which is not usual, did not run.
    """

    name: str
    probe: str
    figures: Callable[[Mapping[str, Any]], Figures]
    least: float = 0.0
    goal: float | None = None
    most: float | None = None
    reported: bool = False

    def judge(self, result: Mapping[str, Any] | None) -> Verdict:
        """What was found in the probe's result, None where it left none."""
        found = [] if result is None else self.figures(result)
        if not found:
            return Verdict(self, None, False)
        worst = min(found) if self.most is None else max(found)
        enough = worst >= self.least if self.most is None else worst <= self.most
        return Verdict(self, worst, enough or self.reported)


@dataclass(frozen=True)
class Verdict:
    """A gate, the figure that decides, None where none was found, and whether it is met."""

    gate: Gate
    figure: float | None
    met: bool

    def line(self) -> str:
        """The gate, what was found and whether it is met, in words."""
        gate = self.gate
        figure = self.figure
        if gate.reported:
            return f"gate: {gate.name} (reported): {'not measured' if figure is None else f'{figure:.2f}'}"
        wanted = f"at least {gate.least:g}" if gate.most is None else f"at most {gate.most:g}"
        wanted = "none" if gate.most == 0 else wanted
        wanted += "" if gate.goal is None else f", goal {gate.goal:g}"
        if figure is None:
            return f"gate: {gate.name} ({wanted}): not measured"
        shown = f"{figure:.0f}" if gate.most == 0 or figure >= 1000 else f"{figure:.2f}"
        return f"gate: {gate.name} ({wanted}): {shown}, {'met' if self.met else 'NOT met'}"


def _rows(
    result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]
) -> Iterator[Sequence[float | None]]:
    """Time, share of the read rate and rival's time of cases whose names begin so, at these sizes."""
    for name, case in result["cases"].items():
        if name.startswith(tuple(beginnings)):
            yield from (case["rows"][size] for size in sizes if size in case.get("rows", {}))


def _shares(result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]) -> Figures:
    return [share for _, share, _ in _rows(result, beginnings, sizes) if share is not None]


def _times(result: Mapping[str, Any], beginnings: Sequence[str], sizes: Sequence[str]) -> Figures:
    return [us for us, _, _ in _rows(result, beginnings, sizes) if us is not None]


def _chunk_rates(result: Mapping[str, Any], part: str) -> Figures:
    return [1e-6 * rate for rate in _shares(result, ["delta_chunks "], [part])]


def _against_wide(result: Mapping[str, Any], kind: str) -> Figures:
    rows = _rows(result, [f"{kind} "], FEW_ROWS)
    return [rival / us for us, _, rival in rows if us is not None and rival is not None]


def _ceiling(result: Mapping[str, Any], k: int) -> Figures:
    """A round's floor counts its drafts, so its share is that of the speculative byte ceiling."""
    row = result["models"].get("MiMo-7B", {}).get(f"k={k}", {})
    return [row["share_of_floor"]] if "share_of_floor" in row else []


def _of_forms(result: Mapping[str, Any], field: str) -> Figures:
    return [found[field] for found in result["forms"].values() if field in found]


LARGE_BYTES = 64e6
"""Of weights, or of keys and values: less is read in the time that a launch takes."""
SIZES = re.compile(r" (qkv|out|gate_up|down|head) (\d+)x(\d+)$")


def _large_products(result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The cases of 16-bit weights whose reading takes long enough to be compared with a rate."""
    for name, case in result["cases"].items():
        found = SIZES.search(name)
        if found and 2 * int(found[2]) * int(found[3]) >= LARGE_BYTES and "rows" in case:
            yield case


def _large_shares(result: Mapping[str, Any]) -> Figures:
    rows = [row for case in _large_products(result) for row in case["rows"].values()]
    return [share for _, share, _ in rows if share is not None]


def _eight_over_one(result: Mapping[str, Any]) -> Figures:
    return [case["8_over_1"][0] for case in _large_products(result) if case.get("8_over_1")]


def _plain(result: Mapping[str, Any], field: str, model: str = "Qwen3-8B") -> Figures:
    found = result["models"].get(model, {}).get(field)
    return [] if found is None else [found] if isinstance(found, float | int) else found[:1]


def _pair(result: Mapping[str, Any], name: str, field: str) -> Figures:
    row = result["pairs"].get(name, {}).get("k", {}).get("4", {})
    return [row[field]] if field in row else []


def _host_reads(result: Mapping[str, Any]) -> Figures:
    parts = [result.get("sampling", {}), *result.get("pairs", {}).values()]
    return [part["host_reads"]["syncs"] for part in parts if "host_reads" in part]


def _ratios(result: Mapping[str, Any], peers: Sequence[str]) -> Figures:
    """Plain decoding over each of the peers that ran, in whichever contest."""
    wanted = [f"spd plain / {peer}" for peer in peers]
    ratios = [contest.get("ratios", {}) for contest in result.values()]
    return [found[name]["median"] for found in ratios for name in wanted if name in found]


def _tests(result: Mapping[str, Any]) -> Figures:
    """Nothing where no test ran at all."""
    return [len(result["failed"]) + result["of"] - result["files"]] if result["passed"] else []


def _dense_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    yield table(
        "products of 64 MB and more, of the read rate", figures=_large_shares, least=0.9, goal=0.95
    )
    yield table("their time at 8 rows over that at 1", figures=_eight_over_one, most=1.05)
    large = [
        f"paged_attention {slots}" for slots in ("1 slots 32768", "16 slots 1024", "16 slots 4096")
    ]
    attention = partial(
        _shares, beginnings=[*large, "paged_attention 16 slots 32768"], sizes=["1", "5"]
    )
    yield table("decode attention, of the read rate", figures=attention, least=0.8, goal=0.88)
    plain = partial(Gate, probe="plain")
    share = partial(_plain, field="share_of_floor")
    yield plain("8B plain at batch 1, of the byte floor", figures=share, least=0.78, goal=0.87)
    yield plain("us between rounds", figures=partial(_plain, field="idle_us"), most=30, goal=10)
    yield plain("host reads in rounds", figures=_host_reads, most=0)
    pairs = partial(Gate, probe="draft")
    yield pairs("host reads in rounds with drafts", figures=_host_reads, most=0)
    eagle = "EAGLE-size > Qwen3-8B"
    small = "Qwen3-0.6B > Qwen3-8B"
    ceiling = partial(_pair, name=eagle, field="share_of_ceiling")
    yield pairs(
        "EAGLE-size drafter, k = 4, of the byte ceiling", figures=ceiling, least=0.69, goal=0.83
    )
    speed = partial(_pair, name=eagle, field="speedup")
    yield pairs("the same over plain, length 3.08", figures=speed, least=2.2, goal=2.4)
    ceiling = partial(_pair, name=small, field="share_of_ceiling")
    yield pairs("0.6B drafter, k = 4, of the byte ceiling", figures=ceiling, least=0.6)
    heads = partial(Gate, probe="eagle3")
    ceiling = partial(_pair, name="EAGLE-3 > Qwen3-8B", field="share_of_ceiling")
    yield heads(
        "EAGLE-3 head of 8B, k = 4, of the byte ceiling", figures=ceiling, least=0.69, goal=0.83
    )
    speed = partial(_pair, name="EAGLE-3 > Qwen3-8B", field="speedup")
    yield heads("EAGLE-3 head of 8B over plain, length 3.08", figures=speed, least=2.2, goal=2.4)
    eager = partial(_ratios, peers=["transformers eager"])
    yield Gate("8B over eager transformers", "peers_eager", eager, least=4)
    loop = partial(_ratios, peers=["compiled loop", "tuned compiled loop"])
    yield Gate("8B over a compiled loop", "peers_loop", loop, least=1.25)
    static = partial(_ratios, peers=["transformers static compiled"])
    yield Gate("8B over compiled transformers", "peers_static", static, reported=True)
    texts = (
        ("spd_demo", "the demo's", ENOUGH_TOKENS),
        ("self_draft", "the 8B shape's", A_FEW_TOKENS),
        ("self_draft_long", "of many k, the 8B shape's", ENOUGH_TOKENS),
    )
    for probe, whose, enough in texts:
        changed = "tokens that speculation changed"
        otherwise = "requests that accepted otherwise"
        yield Gate(f"{whose} {changed}", probe, lambda one: [one["differing_tokens"]], most=0)
        yield Gate(f"{whose} {otherwise}", probe, lambda one: [one["differing_counts"]], most=0)
        yield Gate(
            f"{whose} tokens compared", probe, lambda one: [one["compared_tokens"]], least=enough
        )
    yield Gate(
        "GPU tests that failed, and files of them that did not end", "gpu_tests", _tests, most=0
    )


def _sparse_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="kernel_table")
    # 16 slots alone: the latents of one are read in the time that the launches take (see LARGE_BYTES).
    yield table(
        "latent attention of 16 slots at one query, of the read rate",
        figures=partial(
            _shares, beginnings=["mla V3 16 slots", "mla V2-Lite 16 slots"], sizes=["1"]
        ),
        least=0.65,
        goal=0.78,
    )
    for words, sizes, least in (
        ("1", ["1"], 0.5),
        ("8", ["8"], 0.75),
        ("16 and more", ["16", "64"], 0.85),
    ):
        figures = partial(_shares, beginnings=MANY_EXPERTS, sizes=sizes)
        yield table(
            f"128 experts at {words} rows, of the touched bytes", figures=figures, least=least
        )
    for kind in ("int8", "fp8"):
        shares = partial(_shares, beginnings=[f"{kind} "], sizes=FEW_ROWS)
        yield table(
            f"{kind} products up to 8 rows, of the read rate", figures=shares, least=0.8, goal=0.88
        )
        ratio = partial(_against_wide, kind=kind)
        yield table(f"{kind} products against wide ones", figures=ratio, least=1.6, goal=1.85)
    shares = partial(_shares, beginnings=["int4 "], sizes=FEW_ROWS)
    # An H200 reads four bits faster than it unpacks them; on consumer cards the goal is 0.75.
    yield table(
        "int4 products up to 8 rows, of the read rate", figures=shares, least=0.4, goal=0.75
    )
    for k in (1, 3):
        name = f"MTP at a 7B shape, k = {k}, of the speculative byte ceiling"
        yield Gate(name, "sparse_models", partial(_ceiling, k=k), least=0.75)
    forms = partial(Gate, probe="eight_bit_rounds")
    yield forms(
        "tokens that speculation changed",
        figures=partial(_of_forms, field="differing_tokens"),
        most=0,
    )
    yield forms(
        "tokens compared", figures=partial(_of_forms, field="compared_tokens"), least=ENOUGH_TOKENS
    )
    yield forms(
        "requests that accepted otherwise, eager or captured, at any lag",
        figures=partial(_of_forms, field="differing_counts"),
        most=0,
    )


def _recurrent_gates() -> Iterator[Gate]:
    table = partial(Gate, probe="recurrent_table")
    # 16 and 64 slots: the states of fewer are read in the time that a launch takes (see LARGE_BYTES).
    for k in (0, 1, 4, 8):
        large = [f"delta_rule {name} {slots} slots" for name in RECURRENT for slots in (16, 64)]
        figures = partial(_shares, beginnings=large, sizes=[f"k={k}"])
        name = f"states of recurrent layers read and written, k = {k}, of the read rate"
        yield table(name, figures=figures, least=0.75, goal=0.85)
    few = [f"short_conv {name} {slots} slots" for name in RECURRENT for slots in (1, 4, 16)]
    times = partial(_times, beginnings=few, sizes=["k=0", "k=4"])
    yield table(
        "short convolutions of up to 16 slots and 5 rows, us", figures=times, most=8, goal=5
    )
    for part in ("rule", "convolution"):
        name = f"a prompt's chunks through a recurrent layer's {part}, million tokens a second"
        yield table(name, figures=partial(_chunk_rates, part=part), least=2, goal=5)


GATES = (*_dense_gates(), *_sparse_gates(), *_recurrent_gates())


PEERS = {"peers_eager", "peers_loop"}
"""Probes beside whose figures those of compiled transformers are looked for."""


def judge(probes: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """A verdict for each gate whose probe was to run, also where the probe found nothing for it."""
    return [
        gate.judge(probes.get(gate.probe, {}).get("result"))
        for gate in GATES
        if gate.probe in probes or (gate.reported and not PEERS.isdisjoint(probes))
    ]


def gate_lines(probes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The verdicts in words."""
    return [verdict.line() for verdict in judge(probes)]


ALL_WELL = 0
NOT_WELL = 1
NOT_MEASURED = 4
UNFINISHED = ("cut short", "not run")
"""Statuses of probes that did nothing wrong, but had no more time."""


def exit_status(probes: Mapping[str, Mapping[str, Any]]) -> int:
    """NOT_WELL where a gate is missed or a probe failed; else NOT_MEASURED where anything was left out."""
    verdicts = judge(probes)
    statuses = [probe["status"] for probe in probes.values()]
    missed = any(one.figure is not None and not one.met for one in verdicts)
    if missed or any(status not in ("ok", *UNFINISHED) for status in statuses):
        return NOT_WELL
    asked = [one for one in verdicts if not one.gate.reported]
    unfinished = any(one.figure is None for one in asked) or any(
        one in UNFINISHED for one in statuses
    )
    return NOT_MEASURED if unfinished else ALL_WELL

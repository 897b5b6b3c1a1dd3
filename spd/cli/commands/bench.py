"""`spd bench`: every way of decoding on the same prompts, interleaved with plain decoding, with intervals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.options import (
    JsonOptions,
    ModelArgument,
    ModelOptions,
    advanced,
    argument,
    first,
    option,
)
from spd.cli.parser import in_order, parse_as, parse_size
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink, check_writable, to_json
from spd.cli.terminal.tables import fact_lines, table_lines
from spd.errors import CheckFailedError, UsageError
from spd.formats.files import read_input
from spd.runtime.lab import DRAFTING, MACHINE, compare_results, verdict
from spd.runtime.plan.config import METHODS, EngineConfig, split_spec

if TYPE_CHECKING:
    from spd.runtime.lab import Prompt, Sweep


def split(text: str, flag: str) -> list[str]:
    """The members of a comma list, each once. Raises UsageError for an empty member."""
    members = [member.strip() for member in text.split(",")]
    if not all(members):
        raise UsageError(f"{flag} {text!r} has an empty member", fix=[f"{flag} A,B"])
    return list(dict.fromkeys(members))


def numbers(
    text: str, flag: str, kind: Literal["int", "float"], low: float, high: float
) -> list[float]:
    """A comma list of numbers within bounds. Raises UsageError naming the one that is not."""
    found = [float(parse_as(flag, kind, member)) for member in split(text, flag)]
    for value in found:
        if not low <= value <= high:
            raise UsageError(
                f"{flag} {value:g} is out of range", reason=[f"valid: {low:g} to {high:g}"]
            )
    return list(dict.fromkeys(found))


def chosen_prompts(path: Path | None, category: str | None = None) -> tuple[Prompt, ...]:
    """The prompts asked for: of a file all, of spd's own two of each category."""
    from spd.runtime.lab import OWN, choose, read_prompts

    categories = split(category, "--category") if category is not None else None
    chosen: tuple[Prompt, ...] = choose(read_prompts(path or OWN), categories, None if path else 2)
    return chosen


SCHEMA = "spd.bench/1"
ALIKE = ("device", "dtype", "quantize", "kernels", "memory_fraction", "threads", "load")
"""Wishes that all engines share; of others there are lists, and an engine for each combination."""

_sweep, _work = partial(option, "What is compared"), partial(option, "What is asked")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(ModelArgument, ModelOptions):
    """Everything `spd bench` takes. The axes of the sweep are comma lists."""

    spec: str = first(
        "auto", "METHODS", f"{', '.join(METHODS)}; mtp+ngram. Plain is always measured."
    )
    draft_model: str | None = first(
        None, "MODEL", "A smaller model, an EAGLE-3 head or an assistant."
    )
    draft_max: str = first("auto", "K,…", "Draft tokens a round; a list of them is held fixed.")
    temperature: str = first("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = first(64, "N", "Most tokens in a reply. Default: 64.", "-n", min=2)
    concurrency: str = first("1", "N,…", "Requests at a time; with --rate, most slots. Default: 1.")
    json: bool = first(False, None, "One JSON object with every sample.")
    output: Path | None = first(None, "FILE", "Write the JSON object there too.", "-o")
    mtp: str | None = _sweep(None, "HEAD", "A folder with an MTP head.")
    adaptive: bool | None = _sweep(
        None, None, "Adapt K, or hold it fixed.", "--adaptive/--no-adaptive"
    )
    verify: str = _sweep("coupled", "RULES", "coupled, rejection, block.")
    synthetic_acceptance: float | None = _sweep(
        None, "LENGTH", "Impose so many tokens a round: speed only."
    )
    load: Literal["auto", "dummy"] = _sweep("auto", "HOW", "dummy: random weights, speed only.")
    category: str | None = _work(
        None, "NAMES", "code, edit, summarise, reasoning, creative. Default: all."
    )
    prompts: Path | None = _work(
        None, "FILE", 'Your own: lines of text, or {"prompt": …} in a .jsonl.'
    )
    prompt_tokens: str | None = _work(
        None, "N,…", "Lengthen or cut prompts to N tokens, such as 1k."
    )
    ignore_eos: bool = _work(False, None, "Do not stop at the end of the text.")
    rate: str | None = _work(None, "R,…", "Requests a second, Poisson arrivals (open loop).")
    repetitions: int | None = _work(
        None, "N", "Default: as many as fit into 80 s, 3 to 20.", "-r", min=1
    )
    lag: str = advanced("auto", "N,…", "Rounds the host may run behind: auto, 0, 1, 2.")
    graphs: str = advanced("auto", "MODES", "CUDA graphs: auto, on, off.")
    tp: str = advanced("1", "N,…", "Tensor parallel ranks. Default: 1.")
    draft_tp: str = advanced("auto", "N,…", "Ranks that share the drafter, or auto.")
    memory_fraction: float = advanced(
        0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9."
    )


def bench(session: Session, options: BenchOptions) -> None:
    """Measure speculation against plain decoding; the exit code is 6 if texts differ.

    Examples:
      spd bench -m FOLDER --spec draft,ngram --draft-max 2,4,8 -o today.json
      spd bench --concurrency 1,4,16 --category code
    """
    from spd.runtime.lab import Load, Settings, Sweep, encode_questions

    if options.output is not None:
        check_writable(options.output)
    slots = numbers(options.concurrency, "--concurrency", "int", 1, 1024)
    rates: Sequence[float | None] = [None]
    if options.rate is not None:
        rates = numbers(options.rate, "--rate", "float", 1e-3, 1e4)
    settings = Settings(
        temperatures=tuple(numbers(options.temperature, "--temperature", "float", 0, 100)),
        loads=tuple(Load(int(count), rate) for count, rate in product(slots, rates)),
        **{name: getattr(options, name) for name in ("max_tokens", "repetitions", "ignore_eos")},
    )
    configs, sink = sweep_configs(options), Sink.stdout()
    lengths: list[int | None] = [None]
    if options.prompt_tokens is not None:
        lengths = [parse_size(size) for size in split(options.prompt_tokens, "--prompt-tokens")]
    prompts = chosen_prompts(options.prompts, options.category)
    questions = encode_questions(configs[0].model, prompts, lengths, settings.max_tokens)
    longest = max(len(question.ids) for question in questions)
    configs = [
        replace(config, ctx=longest + settings.max_tokens) for config in configs
    ]  # and no more cache
    sweep = Sweep(configs, questions, settings)
    sweep.watch = lambda ended: session.guard.check()
    try:
        with Ticker(session.console) as ticker:
            sweep.report = partial(ticker.count, amount="{:,} passes".format)
            sweep.run()
    except Interrupted:
        _deliver(options, bench_result(options, sweep, interrupted=True), sink)
        raise
    result = bench_result(options, sweep, interrupted=False)
    _deliver(options, result, sink)
    if sweep.differences:
        words = f"{len(sweep.differences)} texts differ from plain decoding"
        raise CheckFailedError(words, fix=["spd verify"])
    if not result["rows"]:
        words = "nothing was measured: every reply ended at its first token"
        raise CheckFailedError(words, fix=["--ignore-eos", "a larger -n"])


def sweep_configs(options: BenchOptions) -> list[EngineConfig]:
    """One configuration a way of decoding; plain ones first, one for each setting of the machine."""
    from spd.formats.folder import ModelFolder

    base = EngineConfig(
        model=ModelFolder.named(options.model),
        prefix_sharing=False,  # a repeated prompt would be no prompt
        spec="off",
        **{name: getattr(options, name) for name in ALIKE},
    )
    machines = [replace(base, **wishes) for wishes in _combinations(options, MACHINE)]
    ranks = {machine.tp for machine in machines}
    alone = None if max(ranks) > 1 else options.rendezvous
    machines = [
        replace(each, rendezvous=options.rendezvous if each.tp > 1 else alone) for each in machines
    ]
    given = {name: getattr(options, name) for name in ("draft_model", "mtp")}
    folders = {name: ModelFolder.named(value) for name, value in given.items() if value is not None}
    configs = list(machines)
    for machine, wishes in product(machines, list(_combinations(options, ("spec", *DRAFTING)))):
        method = wishes["spec"] = in_order(wishes["spec"])
        size, taken = wishes["draft_tp"], METHODS.get(split_spec(method)[0], METHODS["off"]).weights
        drafters = {name: folder for name, folder in folders.items() if name in taken}
        dividing = [
            tp for tp in ranks if not size or tp % size == 0
        ] or ranks  # what no --tp fits is refused
        if method in ("off", "plain", "none") or machine.tp not in dividing:
            continue
        fixed = options.synthetic_acceptance is not None or wishes["verify"] != "coupled"
        adaptive = "," not in options.draft_max if options.adaptive is None else options.adaptive
        wishes = {**wishes, "adaptive": adaptive and not fixed, "draft_tp": size if taken else None}
        wishes["synthetic_acceptance"] = options.synthetic_acceptance
        config = replace(machine, **wishes, **drafters)
        if config not in configs:  # lookup has no ranks of its own
            configs.append(config)
    return configs


def _combinations(options: BenchOptions, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every combination of the members of some options that take a list."""
    kinds = {field.name: str(field.type) for field in fields(EngineConfig)}
    axes = []
    for name in names:
        flag = "--" + name.replace("_", "-")
        axes.append(
            [parse_as(flag, kinds[name], word) for word in split(getattr(options, name), flag)]
        )
    return (dict(zip(names, values, strict=True)) for values in product(*axes))


def _deliver(options: BenchOptions, result: dict[str, Any], sink: Sink) -> None:
    """Print what has been measured, and write it to the file that was named."""
    sink.answer(options.json, result, bench_text(result))
    if options.output is not None:
        with closing(Sink(options.output)) as file:
            file.write(to_json(result) + "\n")


def bench_result(options: BenchOptions, sweep: Sweep, *, interrupted: bool) -> dict[str, Any]:
    """The object of `spd bench --json`; its schema is shipped in `spd/runtime/lab/schemas`."""
    from spd.cli.reply_view import versions
    from spd.runtime.lab import describe_machine, make_rows

    return {
        "schema": SCHEMA,
        "model": options.model,
        "versions": versions(),
        "machine": describe_machine(),
        "settings": {**asdict(sweep.settings), "draft_model": options.draft_model},
        "prompts": {q.prompt.name: q.prompt.digest for q in sweep.questions},
        "plans": sweep.plans,
        "rows": make_rows(sweep.samples, sweep.plans),
        "equality": {"tokens": sweep.compared, "differences": sweep.differences},
        "samples": [asdict(sample) for sample in sweep.samples],
        "interrupted": interrupted,
    }


SLOWER = "▼"
Row = Mapping[str, Any]


def bench_text(result: Mapping[str, Any]) -> list[str]:
    """A table, and what stands below it."""
    if not result["rows"]:
        return ["nothing was measured"]
    figures = FIGURES if shutil.get_terminal_size((120, 0)).columns < 100 else (*FIGURES, *WIDE)
    return [*row_table(result["rows"], figures), *fact_lines(_facts(result)), LEGEND]


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    """What was measured with what, whether texts are equal and rows complete, and what was fastest."""
    plan, versions, rows, equality = (result[n] for n in ("plans", "versions", "rows", "equality"))
    plan, differences = plan[0], equality["differences"]
    machine = (
        f"CPU x{plan['threads']}" if plan["device"] == "cpu" else result["machine"].get("gpu", "?")
    )
    asked = {(each["config"], json.dumps(each["work"])) for each in result["samples"]}
    lost = len(asked) - sum(row["category"] != "all" for row in rows)
    texts = (
        f"equal to plain decoding ({equality['tokens']:,} tokens compared)"
        if equality["tokens"]
        else ""
    )
    if any(row["acceptance"] == "imposed" for row in rows):
        texts = "without meaning: acceptance is imposed, and drafts are taken unread"
    if differences:
        first = "prompt {prompt}, T {temperature:g}, token {position}".format(**differences[0])
        texts = f"{len(differences)} DIFFER from plain decoding; the first: {first}"
    return {
        "model": f"{result['model']} {plan['dtype']}"
        + ", random weights" * (plan["load"] == "dummy"),
        "run": f"{machine} · torch {versions.get('torch', '?')} · spd {versions['spd']} · "
        f"repetitions {rows[0]['repetitions']} · -n {result['settings']['max_tokens']}",
        "texts": texts,
        "rows left out": f"{lost}, where replies ended at the first token" if lost else "",
        "interrupted": "whole repetitions count, and of a first one what was done"
        * result["interrupted"],
        "best": _best(rows),
    }


def _best(rows: Sequence[Row]) -> str:
    """The speculating row with the highest ratio to plain, or that speculation does not pay."""
    if not (paired := [row for row in rows if row["speed_up"]]):
        return ""
    row = max(paired, key=lambda row: row["speed_up"]["median"])
    ratio, found = f"{row['speed_up']['median']:.2f} × plain", verdict(row["speed_up"])
    if found == "slower":
        return f"--spec off: speculation does not pay here ({ratio} at best)"
    return f"{_method(row)} ({row['category']}, T {row['temperature']:g}), {ratio}, {found}"


def _method(row: Row) -> str:
    """`draft k≤4`, with the rule of verification if it is not the usual one."""
    if row["method"] == "plain":
        return "plain"
    rule = "" if row["verify"] == "coupled" else f" {row['verify']}"
    return f"{row['method']} k{'≤' if row['adaptive'] else '='}{row['draft_max']}{rule}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
NAMES: Columns = (
    ("category", lambda row: str(row["category"])),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("tokens", lambda row: str(row["prompt_tokens_asked"] or "own")),
    ("together", lambda row: str(row["concurrency"])),
    ("rate", lambda row: "" if row["rate"] is None else f"{row['rate']:g}/s"),
    ("method", _method),
    ("lag", lambda row: str(row["lag"])),
    ("graphs", lambda row: "on" if row["graphs"] else "off"),
    ("tp", lambda row: str(row["tp"])),
    ("draft-tp", lambda row: str(row["draft_tp"])),
)
"""What tells rows apart."""
ALWAYS = ("category", "T", "method")
LEGEND = "±: 95 % interval for a second run's median · len: tokens a round · TTFT, TPOT, ITL: ms"


def row_table(rows: Sequence[Row], figures: Columns) -> list[str]:
    """What tells rows apart, but for what is the same everywhere, and figures of each."""
    named = [
        (name, cell) for name, cell in NAMES if name in ALWAYS or len(set(map(cell, rows))) > 1
    ]
    columns = (*named, *figures)
    return table_lines(
        [name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows]
    )


def _median(name: str, form: str = ".1f") -> Callable[[Row], str]:
    return lambda row: "" if row[name] is None else format(row[name]["median"], form)


def _share(name: str) -> Callable[[Row], str]:
    """Half of an interval as a share of its median; a single repetition has none."""

    def shown(row: Row) -> str:
        share = (row[name] or {}).get("half_width")
        return "" if share is None else ">99%" if share >= 0.995 else f"{share:.1%}"

    return shown


FIGURES: Columns = (
    ("tok/s", _median("tokens_per_second")),
    ("±", _share("tokens_per_second")),
    (
        "×plain",
        lambda row: (
            _median("speed_up", ".2f")(row) + SLOWER * (verdict(row["speed_up"]) == "slower")
        ),
    ),
    ("±", _share("speed_up")),
    ("len", lambda row: f"{row['acceptance_length']:.2f}"),
    ("acc", lambda row: "" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}"),
    ("TTFT", _median("ttft_ms")),
    ("TPOT", _median("tpot_ms")),
)


def _positions(row: Row) -> str:
    """Per cent of the first, second, … drafts that were accepted, of four at most."""
    pairs = zip(row["accepted_per_position"], row["drafted_per_position"], strict=True)
    return "/".join(
        f"{100 * accepted / drafted:.0f}" for accepted, drafted in list(pairs)[:4] if drafted
    )


WIDE: Columns = (("ITL", _median("itl_ms")), ("by position", _positions))
"""Figures for terminals of 100 columns or more, and for files."""


COMPARED = "spd.compare/1"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(JsonOptions):
    """Everything `spd compare` takes."""

    files: list[Path] = argument("A.json B.json …", "Results of spd bench, the oldest first.")
    threshold: float = first(
        0.03,
        "SHARE",
        "A regression is slower by more, and by more than noise. Default: 0.03.",
        min=0,
        max=1,
    )


def compare(session: Session, options: CompareOptions) -> None:
    """Compare results of spd bench with the first; the exit code is 6 if a row became slower.

    Examples:
      spd compare yesterday.json today.json
    """
    if len(options.files) < 2:
        raise UsageError(
            "a comparison needs two results or more", fix=["spd compare A.json B.json"]
        )
    first, *others = options.files
    results = [read_result(path) for path in options.files]
    comparisons = [
        {
            "before": str(first),
            "after": str(path),
            **compare_results(results[0], result, options.threshold),
        }
        for path, result in zip(others, results[1:], strict=True)
    ]
    if not any(comparison["changes"] for comparison in comparisons):
        why = ["Rows match by model, prompts, -n, temperature, load, method and settings."]
        fix = ["measure with the same options: spd bench --help"]
        raise UsageError("no rows of these results measure the same work", reason=why, fix=fix)
    sink = Sink.stdout()
    shown = {"schema": COMPARED, "threshold": options.threshold, "comparisons": comparisons}
    sink.answer(options.json, shown, [line for each in comparisons for line in _lines(each)])
    slower = sum(
        change["regressed"] for comparison in comparisons for change in comparison["changes"]
    )
    if slower:
        words = (
            f"{slower} rows are slower by more than {options.threshold:.3g} and by more than noise"
        )
        raise CheckFailedError(words, fix=["spd explain says what a round's time goes into"])


def _lines(comparison: dict[str, Any]) -> list[str]:
    figures: Columns = (
        ("before", lambda row: f"{row['before']:.1f}"),
        ("after", lambda row: f"{row['after']:.1f}"),
        ("change", lambda row: f"{row['change']:+.1%}"),
        ("verdict", lambda row: row["verdict"] + (f" {SLOWER}" if row["regressed"] else "")),
    )
    lines = [f"{Path(comparison['before']).name} → {Path(comparison['after']).name}"]
    lines += [f"not under the same conditions: {each}" for each in comparison["conditions"]]
    lines += row_table(comparison["changes"], figures) if comparison["changes"] else []
    only = ((comparison["only_before"], "first"), (comparison["only_after"], "second"))
    return [*lines, *(f"{count} rows only in the {where}" for count, where in only if count)]


def read_result(path: Path) -> dict[str, Any]:
    """The object that `spd bench -o FILE` wrote. Raises NotFoundError and UsageError naming the file."""
    fix = ["spd bench -o FILE writes one"]
    try:
        value = json.loads(read_input(path, fix[0]))
        if (schema := value["schema"]) != SCHEMA:
            raise ValueError(f"schema {schema!r}, expected {SCHEMA}")
        _lines(
            {"before": "", "after": "", **compare_results(value, value, 0.0)}
        )  # reads all that is read
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        ArithmeticError,
        RecursionError,
    ) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a result of spd bench", reason=[why], fix=fix) from None
    return dict(value)

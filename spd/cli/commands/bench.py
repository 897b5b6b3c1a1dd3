"""`spd bench`: every way of decoding on the same prompts, interleaved with plain decoding, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.commands.bench_report import bench_text
from spd.cli.commands.values import chosen_prompts, numbers, split
from spd.cli.options import (
    ModelArgument,
    ModelOptions,
    advanced,
    first,
    in_order,
    option,
    parse_as,
    parse_size,
    printed,
)
from spd.cli.signals import Interrupted
from spd.cli.text.output import Session, Sink, check_writable, to_json
from spd.cli.text.progress import Ticker
from spd.errors import CheckFailedError, UsageError
from spd.runtime.plan.config import METHODS, split_spec

if TYPE_CHECKING:
    from spd.runtime import EngineConfig
    from spd.runtime.lab import Settings, Sweep

SCHEMA = "spd.bench/1"
ALIKE = ("device", "dtype", "quantize", "kernels", "memory_fraction", "threads", "load")
MACHINE = ("lag", "graphs", "tp")
DRAFTING = ("spec", "draft_max", "verify", "draft_tp")
"""Wishes that all engines share, and those that take a list: each combination has a plain engine, too, or
speculates."""

_sweep, _work = partial(option, "What is compared"), partial(option, "What is asked")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(ModelArgument, ModelOptions):
    """Everything `spd bench` takes. The axes of the sweep are comma lists."""

    spec: str = first("auto", "METHODS", f"{', '.join(METHODS)}; mtp+ngram. Plain is always measured.")
    draft_model: str | None = first(None, "MODEL", "A smaller model, an EAGLE-3 head or an assistant.")
    draft_max: str = first("auto", "K,…", "Draft tokens a round; a list of them is held fixed.")
    temperature: str = first("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = first(64, "N", "Tokens a reply at most. Default: 64.", "-n", min=2)
    concurrency: str = first("1", "N,…", "Requests at a time; with --rate, slots at most. Default: 1.")
    json: bool = first(False, None, "One JSON object with every sample.")
    mtp: str | None = _sweep(None, "HEAD", "A folder with an MTP head.")
    adaptive: bool | None = _sweep(
        None, None, "Fit K to what is accepted, or hold it.", "--adaptive/--no-adaptive"
    )
    verify: str = _sweep("coupled", "RULES", "coupled, rejection, block.")
    synthetic_acceptance: float | None = _sweep(
        None, "LENGTH", "Impose this many tokens a round: speed only."
    )
    load: Literal["auto", "dummy"] = _sweep(
        "auto", "HOW", "dummy: random weights of the configured shapes, speed only."
    )
    category: str | None = _work(
        None, "NAMES", "code, edit, summarise, reasoning, creative. Default: all of them."
    )
    prompts: Path | None = _work(None, "FILE", 'Your own: lines of text, or {"prompt": …} in a .jsonl.')
    prompt_tokens: str | None = _work(None, "N,…", "Lengthen or cut prompts to N tokens, such as 1k.")
    ignore_eos: bool = _work(False, None, "Do not stop at the end of the text.")
    rate: str | None = _work(None, "R,…", "Requests a second as they come by chance (open loop).")
    repetitions: int | None = _work(None, "N", "Default: as many as fit into 80 s, 3 to 20.", "-r", min=1)
    output: Path | None = printed(None, "FILE", "Write the JSON object there too.", "-o")
    lag: str = advanced("auto", "N,…", "Rounds the host may run behind: auto, 0, 1, 2.")
    graphs: str = advanced("auto", "MODES", "CUDA graphs: auto, on, off.")
    tp: str = advanced("1", "N,…", "Tensor parallel ranks. Default: 1.")
    draft_tp: str = advanced("auto", "N,…", "Ranks that share the drafter, or auto.")
    memory_fraction: float = advanced(0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9.")


def bench(session: Session, options: BenchOptions) -> None:
    """Measure speculation against plain decoding; exits 6 if texts differ."""
    from spd.runtime.lab import Sweep, encode_questions

    if options.output is not None:
        check_writable(options.output)
    settings, configs, sink = _settings(options), sweep_configs(options), Sink.stdout()
    lengths: list[int | None] = [None]
    if options.prompt_tokens is not None:
        lengths = [parse_size(size) for size in split(options.prompt_tokens, "--prompt-tokens")]
    prompts = chosen_prompts(options.prompts, options.category)
    questions = encode_questions(configs[0].model, prompts, lengths, settings.max_tokens)
    longest = max(len(question.ids) for question in questions)
    configs = [replace(config, ctx=longest + settings.max_tokens) for config in configs]  # and no more cache
    sweep = Sweep(configs, questions, settings, check=session.guard.check)
    try:
        with Ticker(session.console) as ticker:
            sweep.report = partial(ticker.count, amount="{:,} passes".format)
            sweep.run()
    except Interrupted:
        _deliver(options, bench_result(options, sweep, interrupted=True), sink)
        raise
    result = bench_result(options, sweep, interrupted=False)
    _deliver(options, result, sink)
    wrong = []
    if result["equality"]["differences"]:
        wrong.append(f"{len(result['equality']['differences'])} texts differ from plain decoding")
    if not result["rows"]:
        wrong.append("nothing was measured: every reply ended at its first token")
    if wrong:
        raise CheckFailedError("; ".join(wrong), fix=["spd explain, spd verify"])


def _settings(options: BenchOptions) -> Settings:
    from spd.runtime.lab import Load, Settings

    slots = numbers(options.concurrency, "--concurrency", "int", 1, 1024)
    rates: Sequence[float | None] = [None]
    if options.rate is not None:
        rates = numbers(options.rate, "--rate", "float", 1e-3, 1e4)
    return Settings(
        temperatures=tuple(numbers(options.temperature, "--temperature", "float", 0, 100)),
        loads=tuple(Load(int(count), rate) for count, rate in product(slots, rates)),
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
        ignore_eos=options.ignore_eos,
    )


def sweep_configs(options: BenchOptions) -> list[EngineConfig]:
    """One configuration a way of decoding; plain ones first, one for each setting of the machine."""
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig

    base = EngineConfig(
        model=ModelFolder.named(options.model),
        prefix_sharing=False,  # a repeated prompt would be no prompt
        spec="off",
        **{name: getattr(options, name) for name in ALIKE},
    )
    machines = [replace(base, **wishes) for wishes in _combinations(options, MACHINE)]
    ranks = [machine.tp for machine in machines]
    machines = [
        replace(machine, rendezvous=options.rendezvous if machine.tp > 1 or max(ranks) == 1 else None)
        for machine in machines
    ]
    given = {name: getattr(options, name) for name in ("draft_model", "mtp")}
    folders = {name: ModelFolder.named(value) for name, value in given.items() if value is not None}
    configs = list(machines)
    for machine, wishes in product(machines, list(_combinations(options, DRAFTING))):
        method = wishes["spec"] = in_order(wishes["spec"])
        size = wishes["draft_tp"]
        if size is not None and all(tp % size for tp in ranks):
            raise UsageError(
                f"--draft-tp {size} divides no --tp of {options.tp}",
                reason=["Ranks form groups of one size that each run the drafter."],
                fix=[f"--tp {size}", "--draft-tp auto"],
            )
        taken = METHODS.get(split_spec(method)[0], METHODS["off"]).weights  # an unknown one is refused below
        drafters = {name: folder for name, folder in folders.items() if name in taken}
        if len(drafters) == 2:
            del drafters["mtp"]
        if method in ("off", "plain", "none") or machine.tp % (size or 1):
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
    from spd.runtime import EngineConfig

    kinds = {field.name: str(field.type) for field in fields(EngineConfig)}
    axes = []
    for name in names:
        flag = "--" + name.replace("_", "-")
        axes.append([parse_as(flag, kinds[name], word) for word in split(getattr(options, name), flag)])
    return (dict(zip(names, values, strict=True)) for values in product(*axes))


def _deliver(options: BenchOptions, result: dict[str, Any], sink: Sink) -> None:
    """Print what has been measured, and write it to the file that was named."""
    sink.answer(options.json, result, bench_text(result))
    if options.output is not None:
        with closing(Sink(options.output)) as file:
            file.write(to_json(result) + "\n")


def bench_result(options: BenchOptions, sweep: Sweep, *, interrupted: bool) -> dict[str, Any]:
    """The object of `spd bench --json`; its schema is shipped in `spd/runtime/lab/schemas`."""
    from spd.cli.text.report import versions
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
        "samples": [{**asdict(sample), "speed": sample.speed} for sample in sweep.samples],
        "interrupted": interrupted,
    }

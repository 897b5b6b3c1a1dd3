"""`spd bench`: models and ways of decoding on the same prompts, interleaved with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.bench_table import SCHEMA, bench_text
from spd.cli.options import (
    ModelArgument,
    ModelOptions,
    advanced,
    argument,
    first,
    option,
)
from spd.cli.parser import in_order, parse_as, parse_size
from spd.cli.plot import PLOT_HELP, check_plot, plot_bench
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink, check_writable, to_json
from spd.errors import CheckFailedError, UsageError
from spd.runtime.lab import DRAFTING_SETTINGS, MACHINE_SETTINGS
from spd.runtime.plan.config import METHODS, EngineConfig, split_spec

if TYPE_CHECKING:
    from spd.runtime.lab import EncodedPrompt, Prompt, Sweep


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
    from spd.runtime.lab import BUILTIN_PROMPTS, read_prompts, select_prompts

    categories = split(category, "--category") if category is not None else None
    chosen: tuple[Prompt, ...] = select_prompts(
        read_prompts(path or BUILTIN_PROMPTS), categories, None if path else 2
    )
    return chosen


BEGINNING = 2000  # characters of each prompt by which tokenizers are compared
ALIKE = ("device", "dtype", "quantize", "kernels", "memory_fraction", "threads", "load")
"""Options that all engines share; of others there are lists, and an engine for each combination."""

_sweep = partial(option, "What is compared")
_work = partial(option, "What is asked")


MODELS = "A folder, GGUF file, org/name or demo; a list of them compares them."


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(ModelArgument, ModelOptions):
    """Everything `spd bench` takes. The axes of the sweep are comma lists."""

    model_argument: str | None = argument("MODEL,…", MODELS, None)
    model: str = first("demo", "MODEL,…", MODELS, "-m", envvar="SPD_MODEL")

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
    plot: Path | None = first(None, "FILE", PLOT_HELP)
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
    """Measure speculation against plain decoding, and models; the exit code is 6 if texts differ.

    Examples:
      spd bench -m FOLDER --spec draft,ngram --draft-max 2,4,8 -o today.json
      spd bench -m FOLDER,FOLDER-int4 --category code
      spd bench --concurrency 1,4,16
    """
    from spd.runtime.lab import Load, Settings, Sweep, encode_prompts

    if options.output is not None:
        check_writable(options.output)
    check_plot(options.plot)
    slots = numbers(options.concurrency, "--concurrency", "int", 1, 1024)
    rates: Sequence[float | None] = [None]
    if options.rate is not None:
        rates = numbers(options.rate, "--rate", "float", 1e-3, 1e4)
    settings = Settings(
        temperatures=tuple(numbers(options.temperature, "--temperature", "float", 0, 100)),
        loads=tuple(Load(int(count), rate) for count, rate in product(slots, rates)),
        **{name: getattr(options, name) for name in ("max_tokens", "repetitions", "ignore_eos")},
    )
    sink = Sink.stdout()
    by_model = {model: sweep_configs(options, model) for model in model_list(options.model)}
    lengths: list[int | None] = [None]
    if options.prompt_tokens is not None:
        lengths = [parse_size(size) for size in split(options.prompt_tokens, "--prompt-tokens")]
    prompts = chosen_prompts(options.prompts, options.category)
    configs: list[EngineConfig] = []
    questions: list[Sequence[EncodedPrompt]] = []
    for its_configs in by_model.values():
        encoded = encode_prompts(its_configs[0].model, prompts, lengths, settings.max_tokens)
        longest = max(len(question.ids) for question in encoded)
        # The cache holds no more than is asked.
        ctx = longest + settings.max_tokens
        configs += [replace(config, ctx=ctx) for config in its_configs]
        questions += [encoded] * len(its_configs)
    names = [model for model, its_configs in by_model.items() for _ in its_configs]
    sweep = Sweep(configs, questions, settings)
    sweep.watch = lambda ended: session.guard.check()
    try:
        with Ticker(session.console) as ticker:
            sweep.report = partial(ticker.count, amount="{:,} passes".format)
            sweep.run()
    except Interrupted:
        _deliver(options, bench_result(options, sweep, names, interrupted=True), sink)
        raise
    result = bench_result(options, sweep, names, interrupted=False)
    _deliver(options, result, sink)
    if sweep.differences:
        words = f"{len(sweep.differences)} texts differ from plain decoding"
        raise CheckFailedError(words, fix=["spd verify"])
    if not result["rows"]:
        words = "nothing was measured: every reply ended at its first token"
        raise CheckFailedError(words, fix=["--ignore-eos", "a larger -n"])


def model_list(text: str) -> list[str]:
    """Return the models of a comma list; a path that is there is one model, whatever its name."""
    return [text] if Path(text).expanduser().exists() else split(text, "--model")


def sweep_configs(options: BenchOptions, model: str = "demo") -> list[EngineConfig]:
    """Return a configuration for each way of decoding, plain ones first, one for each machine setting."""
    from spd.formats.folder import ModelFolder

    base = EngineConfig(
        model=ModelFolder.resolve(model),
        prefix_sharing=False,  # a repeated prompt would be no prompt
        spec="off",
        **{name: getattr(options, name) for name in ALIKE},
    )
    machines = [replace(base, **changes) for changes in _combinations(options, MACHINE_SETTINGS)]
    ranks = {machine.tp for machine in machines}
    alone = None if max(ranks) > 1 else options.rendezvous
    machines = [
        replace(each, rendezvous=options.rendezvous if each.tp > 1 else alone) for each in machines
    ]
    given = {name: getattr(options, name) for name in ("draft_model", "mtp")}
    folders = {
        name: ModelFolder.resolve(value) for name, value in given.items() if value is not None
    }
    configs = list(machines)
    for machine, changes in product(
        machines, list(_combinations(options, ("spec", *DRAFTING_SETTINGS)))
    ):
        method = changes["spec"] = in_order(changes["spec"])
        size = changes["draft_tp"]
        taken = METHODS.get(split_spec(method)[0], METHODS["off"]).weights
        drafters = {name: folder for name, folder in folders.items() if name in taken}
        dividing = [
            tp for tp in ranks if not size or tp % size == 0
        ] or ranks  # what no --tp fits is refused
        if method in ("off", "plain", "none") or machine.tp not in dividing:
            continue
        fixed = options.synthetic_acceptance is not None or changes["verify"] != "coupled"
        adaptive = "," not in options.draft_max if options.adaptive is None else options.adaptive
        changes = {
            **changes,
            "adaptive": adaptive and not fixed,
            "draft_tp": size if taken else None,
        }
        changes["synthetic_acceptance"] = options.synthetic_acceptance
        config = replace(machine, **changes, **drafters)
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


def same_tokens(sweep: Sweep) -> bool:
    """True if all models cut the prompts into the same tokens, so that their tok/s count the same."""
    from spd.formats.folder import ModelFolder

    folders = [ModelFolder.from_path(model) for model in {config.model for config in sweep.configs}]
    if len(folders) == 1:
        return True
    beginnings = [question.prompt.text[:BEGINNING] for question in sweep.prompts[0]]
    tokens = [
        [folder.tokenizer.encode(text) for text in beginnings] if folder.tokenizer else None
        for folder in folders
    ]
    return all(ids == tokens[0] for ids in tokens)


def _deliver(options: BenchOptions, result: dict[str, Any], sink: Sink) -> None:
    """Print what has been measured, and write and draw it to the files that were named."""
    sink.answer(options.json, result, bench_text(result, sink.glyphs()))
    if options.output is not None:
        with closing(Sink(options.output)) as file:
            file.write(to_json(result) + "\n")
    if options.plot is not None and result["rows"]:
        plot_bench(result, options.plot)


def bench_result(
    options: BenchOptions, sweep: Sweep, models: Sequence[str], *, interrupted: bool
) -> dict[str, Any]:
    """Return the object of `spd bench --json`, whose schema is shipped in `spd/runtime/lab/schemas`.

    models: the name of each configuration's model.
    """
    from spd.cli.reply_view import versions
    from spd.runtime.lab import describe_machine, make_rows

    return {
        "schema": SCHEMA,
        "model": options.model,
        "versions": versions(),
        "machine": describe_machine(),
        "settings": {**asdict(sweep.settings), "draft_model": options.draft_model},
        "prompts": {q.prompt.name: q.prompt.digest for q in sweep.prompts[0]},
        "plans": sweep.plans,
        "rows": make_rows(sweep.samples, sweep.plans, models),
        "same_tokens": same_tokens(sweep),
        "equality": {"tokens": sweep.compared, "differences": sweep.differences},
        "samples": [asdict(sample) for sample in sweep.samples],
        "interrupted": interrupted,
    }

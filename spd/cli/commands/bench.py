"""`spd bench`: measures models and methods on the same prompts, interleaved with plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.bench_table import BENCH_SCHEMA, BenchResult, bench_lines
from spd.cli.options import (
    DRAFT_MODEL_HELP,
    ModelArgument,
    ModelOptions,
    advanced_option,
    argument,
    main_option,
    option,
)
from spd.cli.parser import normalize_spec, parse_token_count, parse_value
from spd.cli.plot import PLOT_HELP, check_plot, plot_bench
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import ticking
from spd.cli.terminal.sink import Sink, check_writable, to_json
from spd.errors import CheckFailedError, UsageError
from spd.runtime.lab import DRAFTING_SETTINGS, MACHINE_SETTINGS
from spd.runtime.plan.config import METHODS, EngineConfig, split_spec

if TYPE_CHECKING:
    from spd.runtime.lab import EncodedPrompt, Prompt, Settings, Sweep


def split_comma_list(text: str, flag: str) -> list[str]:
    """Return the distinct members of a comma list in order. Raises UsageError for an empty member.

    flag: the option that holds the list, for errors.
    """
    members = [member.strip() for member in text.split(",")]
    if not all(members):
        raise UsageError(f"{flag} {text!r} has an empty member", fix=[f"{flag} A,B"])
    return list(dict.fromkeys(members))


def parse_number_list(
    text: str, flag: str, annotation: Literal["int", "float"], low: float, high: float
) -> list[float]:
    """Return the distinct numbers of a comma list in order.

    flag: the option that holds the list, for errors. Raises UsageError for a member that is empty,
    no number, or not from `low` to `high`.
    """
    values = [
        float(parse_value(flag, annotation, member)) for member in split_comma_list(text, flag)
    ]
    for value in values:
        if not low <= value <= high:
            raise UsageError(
                f"{flag} {value:g} is out of range", reason=[f"valid: {low:g} to {high:g}"]
            )
    return list(dict.fromkeys(values))


def parse_temperature_list(text: str) -> list[float]:
    """Return the distinct temperatures of a comma list, each from 0 to 100. Raises UsageError."""
    return parse_number_list(text=text, flag="--temperature", annotation="float", low=0, high=100)


def requested_prompts(path: Path | None, category: str | None = None) -> tuple[Prompt, ...]:
    """Read the prompts of a file, or two of each category of spd's own, and return them.

    category: a comma list of categories; None takes all. Raises what reading and choosing raise.
    """
    from spd.runtime.lab import BUILTIN_PROMPTS, read_prompts, select_prompts

    categories = split_comma_list(category, "--category") if category is not None else None
    prompts: tuple[Prompt, ...] = select_prompts(
        read_prompts(path or BUILTIN_PROMPTS), categories, None if path else 2
    )
    return prompts


TOKENIZER_SAMPLE_CHARACTERS = (
    2000  # leading characters of each prompt, by which tokenizers are compared
)
SHARED_CONFIG_FIELDS = (
    "device",
    "dtype",
    "quantize",
    "activations",
    "kv",
    "kernels",
    "memory_fraction",
    "threads",
)
"""Fields of `EngineConfig` that every engine of the sweep takes from the options unchanged."""

_sweep_option = partial(option, "What is compared")
_work_option = partial(option, "What is asked")
"""Make options in two panels of the help."""
MODELS_HELP = "A folder, GGUF file, org/name or demo; a list of them compares them."
"""The help of the argument with the models."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(ModelArgument, ModelOptions):
    """The options of `spd bench`. The axes of the sweep are comma lists."""

    model_argument: str | None = argument("MODEL,…", MODELS_HELP, None)
    model: str = main_option("demo", "MODEL,…", MODELS_HELP, "-m", envvar="SPD_MODEL")

    spec: str = main_option(
        "auto", "METHODS", f"{', '.join(METHODS)}; mtp+ngram. Plain is always measured."
    )
    draft_model: str | None = main_option(None, "MODEL", DRAFT_MODEL_HELP)
    draft_max: str = main_option(
        "auto", "K,…", "Draft tokens a round; a list of them is held fixed."
    )
    temperature: str = main_option("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = main_option(64, "N", "Most tokens in a reply. Default: 64.", "-n", min=2)
    concurrency: str = main_option(
        "1", "N,…", "Requests at a time; with --rate, most slots. Default: 1."
    )
    json: bool = main_option(False, None, "One JSON object with every sample.")
    output: Path | None = main_option(None, "FILE", "Write the JSON object there too.", "-o")
    plot: Path | None = main_option(None, "FILE", PLOT_HELP)
    adaptive: bool | None = _sweep_option(
        None, None, "Adapt K, or hold it fixed.", "--adaptive/--no-adaptive"
    )
    verify: str = _sweep_option("coupled", "RULES", "coupled, rejection, block.")
    synthetic_acceptance: float | None = _sweep_option(
        None, "LENGTH", "Impose so many tokens a round: speed only."
    )
    category: str | None = _work_option(
        None, "NAMES", "code, edit, summarise, reasoning, creative. Default: all."
    )
    prompts: Path | None = _work_option(
        None, "FILE", 'Your own: lines of text, or {"prompt": …} in a .jsonl.'
    )
    prompt_tokens: str | None = _work_option(
        None, "N,…", "Lengthen or cut prompts to N tokens, such as 1k."
    )
    ignore_eos: bool = _work_option(False, None, "Do not stop at the end of the text.")
    rate: str | None = _work_option(None, "R,…", "Requests a second, Poisson arrivals (open loop).")
    repetitions: int | None = _work_option(
        None, "N", "Default: as many as fit into 80 s, 3 to 20.", "-r", min=1
    )
    lag: str = advanced_option("auto", "N,…", "Rounds the host may run behind: auto, 0, 1, 2.")
    graphs: str = advanced_option("auto", "MODES", "CUDA graphs: auto, on, off.")
    tp: str = advanced_option("1", "N,…", "Tensor parallel ranks. Default: 1.")
    draft_tp: str = advanced_option("auto", "N,…", "Ranks that share the drafter, or auto.")
    memory_fraction: float = advanced_option(
        0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9."
    )


def bench(session: Session, options: BenchOptions) -> None:
    """Measure speculation against plain decoding, and models; the exit code is 6 if texts differ.

    Examples:
      spd bench -m FOLDER --spec draft,ngram --draft-max 2,4,8 -o today.json
      spd bench -m FOLDER,FOLDER-int4 --category code
      spd bench --concurrency 1,4,16
    """
    from spd.runtime.lab import Sweep, encode_prompts

    if options.output is not None:
        check_writable(options.output)
    check_plot(options.plot)
    settings = _sweep_settings(options)
    sink = Sink.stdout()
    configs_by_model = {
        model: sweep_configs(options, model) for model in split_models(options.model)
    }
    lengths: list[int | None] = [None]
    if options.prompt_tokens is not None:
        lengths = [
            parse_token_count(size)
            for size in split_comma_list(options.prompt_tokens, "--prompt-tokens")
        ]
    prompts = requested_prompts(options.prompts, options.category)
    configs: list[EngineConfig] = []
    prompts_by_config: list[Sequence[EncodedPrompt]] = []
    for model_configs in configs_by_model.values():
        encoded = encode_prompts(model_configs[0].model, prompts, lengths, settings.max_tokens)
        longest = max(len(question.ids) for question in encoded)
        # The cache has room for the longest prompt and reply only.
        ctx = longest + settings.max_tokens
        configs += [replace(config, ctx=ctx) for config in model_configs]
        prompts_by_config += [encoded] * len(model_configs)
    model_names = [
        model for model, model_configs in configs_by_model.items() for _ in model_configs
    ]
    sweep = Sweep(configs, prompts_by_config, settings)
    sweep.watch = lambda ended: session.guard.raise_if_received()
    try:
        with ticking(session.console) as ticker:
            sweep.report = partial(ticker.show_progress, amount="{:,} passes".format)
            sweep.run()
    except Interrupted:
        _write_results(options, bench_result(options, sweep, model_names, interrupted=True), sink)
        raise
    result = bench_result(options, sweep, model_names, interrupted=False)
    _write_results(options, result, sink)
    if sweep.differences:
        message = f"{len(sweep.differences)} texts differ from plain decoding"
        raise CheckFailedError(message, fix=["spd verify"])
    if not result["rows"]:
        message = "nothing was measured: every reply ended at its first token"
        raise CheckFailedError(message, fix=["--ignore-eos", "a larger -n"])


def _sweep_settings(options: BenchOptions) -> Settings:
    """Return the temperatures, loads, most tokens and repetitions of the sweep.

    Raises UsageError.
    """
    from spd.runtime.lab import Load, Settings

    slots = parse_number_list(
        text=options.concurrency, flag="--concurrency", annotation="int", low=1, high=1024
    )
    rates: Sequence[float | None] = [None]
    if options.rate is not None:
        rates = parse_number_list(
            text=options.rate, flag="--rate", annotation="float", low=1e-3, high=1e4
        )
    return Settings(
        temperatures=tuple(parse_temperature_list(options.temperature)),
        loads=tuple(Load(int(count), rate) for count, rate in product(slots, rates)),
        **{name: getattr(options, name) for name in ("max_tokens", "repetitions", "ignore_eos")},
    )


def split_models(text: str) -> list[str]:
    """Return the distinct models of a comma list. Raises UsageError for an empty member.

    An existing path is one model, even with a comma in its name.
    """
    return [text] if Path(text).expanduser().exists() else split_comma_list(text, "--model")


def sweep_configs(options: BenchOptions, model: str = "demo") -> list[EngineConfig]:
    """Return the configurations of a model: one plain per machine setting, then drafting ones.

    Finds the folders of the model and the draft model. Raises what this raises, and UsageError for
    options that no configuration can have.
    """
    from spd.formats.folder import ModelFolder
    from spd.runtime import takes_draft_model

    base = EngineConfig(
        model=ModelFolder.resolve(model),
        prefix_sharing=False,  # a repeated prompt would skip its prefill
        spec="off",
        **{name: getattr(options, name) for name in SHARED_CONFIG_FIELDS},
    )
    machines = [
        replace(base, **changes) for changes in _option_combinations(options, MACHINE_SETTINGS)
    ]
    ranks = {machine.tp for machine in machines}
    single_rank_rendezvous = None if max(ranks) > 1 else options.rendezvous
    machines = [
        replace(
            machine,
            rendezvous=options.rendezvous if machine.tp > 1 else single_rank_rendezvous,
        )
        for machine in machines
    ]
    draft = None if options.draft_model is None else ModelFolder.resolve(options.draft_model)
    has_one_method = "," not in options.spec
    configs = list(machines)
    drafting_changes = list(_option_combinations(options, ("spec", *DRAFTING_SETTINGS)))
    for machine, changes in product(machines, drafting_changes):
        method = normalize_spec(changes["spec"])
        draft_tp = changes["draft_tp"]
        base_method = split_spec(method)[0]
        has_weights = base_method in METHODS and METHODS[base_method].has_weights
        divisible_ranks = [tp for tp in ranks if not draft_tp or tp % draft_tp == 0]
        usable_ranks = divisible_ranks or ranks  # EngineConfig refuses a value that fits no --tp
        if method in ("off", "plain", "none") or machine.tp not in usable_ranks:
            continue
        is_fixed = options.synthetic_acceptance is not None or changes["verify"] != "coupled"
        adaptive = "," not in options.draft_max if options.adaptive is None else options.adaptive
        changes = {
            **changes,
            "spec": method,
            "adaptive": adaptive and not is_fixed,
            "draft_tp": draft_tp if has_weights else None,
            "synthetic_acceptance": options.synthetic_acceptance,
        }
        if draft is not None and (has_one_method or takes_draft_model(base_method, draft)):
            changes["draft_model"] = draft
        config = replace(machine, **changes)
        if config not in configs:  # n-gram lookup has no ranks, so its combinations repeat
            configs.append(config)
    if draft is not None and all(config.draft_model is None for config in configs):
        message = f"--draft-model {draft}: no method of --spec {options.spec} drafts with it"
        raise UsageError(message, fix=["--spec auto", "leave --draft-model out"])
    return configs


def _option_combinations(options: BenchOptions, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Return each combination of members of the comma lists `names`: a value for each option.

    Raises UsageError for an empty member or one that the option cannot have.
    """
    annotations = {field.name: str(field.type) for field in fields(EngineConfig)}
    axes = []
    for name in names:
        flag = "--" + name.replace("_", "-")
        members = split_comma_list(getattr(options, name), flag)
        axes.append([parse_value(flag, annotations[name], member) for member in members])
    return (dict(zip(names, values, strict=True)) for values in product(*axes))


def have_same_tokens(sweep: Sweep) -> bool:
    """True if all models encode the prompts to the same tokens, so that tok/s compare."""
    from spd.formats.folder import ModelFolder

    folders = [ModelFolder.from_path(model) for model in {config.model for config in sweep.configs}]
    if len(folders) == 1:
        return True
    samples = [question.prompt.text[:TOKENIZER_SAMPLE_CHARACTERS] for question in sweep.prompts[0]]
    encoded_samples = [
        [folder.tokenizer.encode(text) for text in samples] if folder.tokenizer else None
        for folder in folders
    ]
    return all(ids == encoded_samples[0] for ids in encoded_samples)


def _write_results(options: BenchOptions, result: BenchResult, sink: Sink) -> None:
    """Print the result as text or JSON; write it to --output, and a picture of it to --plot."""
    sink.write_result(options.json, result, bench_lines(result, sink.glyphs()))
    if options.output is not None:
        with closing(Sink(options.output)) as file:
            file.write(to_json(result) + "\n")
    if options.plot is not None and result["rows"]:
        plot_bench(result, options.plot)


def bench_result(
    options: BenchOptions, sweep: Sweep, models: Sequence[str], *, interrupted: bool
) -> BenchResult:
    """Return the object of `spd bench --json`, whose schema is shipped in `spd/runtime/lab/schemas`.

    models: the name of each configuration's model.
    """
    from spd.cli.reply_view import package_versions
    from spd.runtime.lab import describe_machine, make_rows

    return {
        "schema": BENCH_SCHEMA,
        "model": options.model,
        "versions": package_versions(),
        "machine": describe_machine(),
        "settings": {**asdict(sweep.settings), "draft_model": options.draft_model},
        "prompts": {q.prompt.name: q.prompt.digest for q in sweep.prompts[0]},
        "plans": sweep.plans,
        "rows": make_rows(sweep.samples, sweep.plans, models),
        "same_tokens": have_same_tokens(sweep),
        "equality": {"tokens": sweep.compared, "differences": sweep.differences},
        "samples": [asdict(sample) for sample in sweep.samples],
        "interrupted": interrupted,
    }

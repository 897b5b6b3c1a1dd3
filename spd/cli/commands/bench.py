"""`spd bench`: every way of decoding on the same prompts, interleaved with plain decoding, with intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.commands.bench_report import render, summary_lines
from spd.cli.commands.values import check_least, chosen_prompts, numbers, parse_share, split
from spd.cli.options import (
    ModelOptions,
    Session,
    advanced,
    first,
    in_order,
    model_names,
    option,
    parse_size,
    printed,
)
from spd.cli.signals import Interrupted
from spd.cli.text.output import (
    Sink,
    check_writable,
    printable,
    to_json,
    write_error,
    write_result,
)
from spd.cli.text.progress import Ticker
from spd.errors import CheckFailedError, SpdError, UsageError
from spd.runtime.plan.config import METHODS, split_spec

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig
    from spd.runtime.lab import Load, Settings, Sweep

SCHEMA = "spd.bench/1"


_sweep, _work = partial(option, "What is compared"), partial(option, "What is asked")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(ModelOptions):
    """Everything `spd bench` takes. The axes of the sweep are comma lists."""

    spec: str = first("auto", "METHODS", f"{', '.join(METHODS)}; mtp+ngram. Plain is always measured.")
    draft_model: str | None = first(
        None, "MODEL", "A smaller model, or an EAGLE-3 head.", autocompletion=model_names
    )
    draft_max: str | None = first(None, "K,…", "Draft tokens a round; a list of them is held fixed.")
    temperature: str = first("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = first(64, "N", "Tokens a reply at most. Default: 64.", "-n")
    concurrency: str = first("1", "N,…", "Requests at a time; with --rate, slots at most. Default: 1.")
    json: bool = first(False, None, "One JSON object with every sample.")
    mtp: str | None = _sweep(None, "HEAD", "A folder with an MTP head.", autocompletion=model_names)
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
    repetitions: int | None = _work(None, "N", "Default: as many as fit into 80 s, 3 to 20.", "-r")
    output: Path | None = printed(None, "FILE", "Write the JSON object there too.", "-o")
    fail_if_slower: str | None = printed(
        None, "3%", "Exit 6 if a row is this much slower than plain decoding."
    )
    lag: str = advanced("auto", "N,…", "Rounds the host may run behind: auto, 0, 1, 2.")
    graphs: str = advanced("auto", "MODES", "CUDA graphs: auto, on, off.")
    tp: str = advanced("1", "N,…", "Tensor parallel ranks. Default: 1.")
    draft_tp: str = advanced("auto", "N,…", "Ranks that share the drafter, or auto.")
    memory_fraction: float = advanced(0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9.")


def bench(session: Session, options: BenchOptions) -> int:
    """Measure speculation against plain decoding; exits 6 if texts differ or --fail-if-slower holds."""
    threshold = None
    if options.fail_if_slower is not None:
        threshold = parse_share(options.fail_if_slower, "--fail-if-slower")
    if options.output is not None:
        check_writable(options.output)
    if threshold is not None and options.repetitions == 1:
        raise UsageError(
            "--fail-if-slower with one repetition",
            reason=["a single repetition has no noise to be told from"],
            fix=["-r 2 or more"],
        )
    settings = _settings(options)
    configs = sweep_configs(options)
    sink = Sink.stdout()
    sweep = _open_sweep(session, options, configs, settings)
    ticker = Ticker(session.console)
    try:
        with ticker:
            sweep.report = ticker.show
            sweep.run()
    except Interrupted:
        _deliver(session, options, sweep, sink, threshold, interrupted=True)
        raise
    return _deliver(session, options, sweep, sink, threshold)


def _open_sweep(
    session: Session, options: BenchOptions, configs: Sequence[EngineConfig], settings: Settings
) -> Sweep:
    from spd.runtime.lab import Sweep, encode_questions

    lengths: list[int | None] = [None]
    if options.prompt_tokens is not None:
        lengths = [parse_size(size) for size in split(options.prompt_tokens, "--prompt-tokens")]
    prompts = chosen_prompts(options.prompts, options.category)
    questions = encode_questions(configs[0].model, prompts, lengths, settings.max_tokens, None)
    longest = max(len(question.ids) for question in questions)
    configs = [replace(config, ctx=longest + settings.max_tokens) for config in configs]  # and no more cache
    return Sweep(configs, questions, settings, check=session.guard.check)


def _settings(options: BenchOptions) -> Settings:
    from spd.runtime.lab import Settings

    check_least(
        ("-n", options.max_tokens, 2),
        ("--repetitions", options.repetitions, 1),
    )
    return Settings(
        temperatures=tuple(numbers(options.temperature, "--temperature", "float", 0, 100)),
        loads=tuple(_loads(options)),
        max_tokens=options.max_tokens,
        repetitions=options.repetitions,
        ignore_eos=options.ignore_eos,
    )


def _loads(options: BenchOptions) -> list[Load]:
    from spd.runtime.lab import Load

    slots = [int(n) for n in numbers(options.concurrency, "--concurrency", "int", 1, 1024)]
    if options.rate is None:
        return [Load(n) for n in slots]
    return [Load(n, rate) for n in slots for rate in numbers(options.rate, "--rate", "float", 1e-3, 1e4)]


def sweep_configs(options: BenchOptions) -> list[EngineConfig]:
    """One configuration a way of decoding; plain ones first, one for each setting of the machine."""
    from spd.formats.folder import ModelFolder
    from spd.runtime import EngineConfig

    draft_max: list[int | None] = [None]
    if options.draft_max is not None:
        draft_max = [int(k) for k in numbers(options.draft_max, "--draft-max", "int", 1, 31)]
    adaptive = options.adaptive if options.adaptive is not None else len(draft_max) < 2
    base = EngineConfig(
        model=ModelFolder.named(options.model),
        device=options.device,
        dtype=options.dtype,
        quantize=options.quantize,
        kernels=options.kernels,
        memory_fraction=options.memory_fraction,
        threads=options.threads,
        load=options.load,
        prefix_sharing=False,  # a repeated prompt would be no prompt
        spec="off",
    )
    for flag, text in (("--lag", options.lag), ("--graphs", options.graphs)):
        if len(chosen := split(text, flag)) > 1 and "auto" in chosen:
            raise UsageError(f"{flag} {text}: auto comes to one of the others", fix=[f"{flag} without auto"])
    sizes = _ranks(options.tp, "--tp")
    machines = [
        replace(
            base,
            lag=None if lag == "auto" else _lag(lag),
            graphs={"auto": None, "on": True, "off": False}[_mode(graphs)],
            tp=tp,
            rendezvous=options.rendezvous if tp > 1 or max(sizes) == 1 else None,
        )
        for lag, graphs, tp in itertools.product(
            split(options.lag, "--lag"), split(options.graphs, "--graphs"), sizes
        )
    ]
    draft, head = (
        None if name is None else ModelFolder.named(name) for name in (options.draft_model, options.mtp)
    )
    methods = [in_order(m) for m in split(options.spec, "--spec") if m not in ("off", "plain", "none")]
    axes: Iterable[Any] = itertools.product(
        machines,
        methods,
        draft_max,
        split(options.verify, "--verify"),
        _groups(options.draft_tp),
    )
    free = {name for name, method in METHODS.items() if not method.weights}
    if not free.issuperset(methods):  # lookup has no groups: it runs once beside those that have
        axes = dict.fromkeys((*axis[:-1], None if axis[1] in free else axis[-1]) for axis in axes)
    fitting = [axis for axis in axes if axis[-1] is None or axis[0].tp % axis[-1] == 0]
    _all_used(options, {axis[-1] for axis in fitting})
    return [
        *machines,
        *(
            replace(
                machine,
                spec=method,
                **_drafters(method, draft, head),
                draft_max=k,
                adaptive=adaptive and options.synthetic_acceptance is None and rule == "coupled",
                verify=rule,
                synthetic_acceptance=options.synthetic_acceptance,
                draft_tp=draft_tp,
            )
            for machine, method, k, rule, draft_tp in fitting
        ),
    ]


def _drafters(method: str, draft: ModelFolder | None, head: ModelFolder | None) -> dict[str, Any]:
    """The named drafters that a method takes."""
    taken = METHODS.get(split_spec(method)[0], METHODS["off"]).weights  # an unknown one is refused later
    given = draft if "draft_model" in taken else None
    return {"draft_model": given, "mtp": head if "mtp" in taken and given is None else None}


def _groups(text: str) -> list[int | None]:
    """Sizes of the groups that draft; None is the plan's choice."""
    return [None if part == "auto" else _ranks(part, "--draft-tp")[0] for part in split(text, "--draft-tp")]


def _all_used(options: BenchOptions, used: set[int | None]) -> None:
    """Raise UsageError for a --draft-tp that divides no --tp."""
    for size in _groups(options.draft_tp):
        if size is not None and size not in used and split(options.spec, "--spec") != ["off"]:
            raise UsageError(
                f"--draft-tp {size} divides no --tp of {options.tp}",
                reason=["Ranks form groups of one size that each run the drafter."],
                fix=[f"--tp {size}", "--draft-tp auto"],
            )


def _ranks(text: str, flag: str) -> list[int]:
    return [int(n) for n in numbers(text, flag, "int", 1, 64)]


def _lag(text: str) -> int:
    return int(numbers(text, "--lag", "int", 0, 2)[0])


def _mode(text: str) -> str:
    if text not in ("auto", "on", "off"):
        raise UsageError(f"--graphs {text} is not known", fix=["--graphs auto,on,off"])
    return text


def _deliver(
    session: Session,
    options: BenchOptions,
    sweep: Sweep,
    sink: Sink,
    threshold: float | None,
    *,
    interrupted: bool = False,
) -> int:
    """Print what has been measured; returns the status. Raises CheckFailedError for a failed check."""
    result = bench_result(options, sweep, interrupted=interrupted)
    unsaved = write_result(options.output, to_json(result) + "\n")
    sink.write(printable(render(result, options, sink.columns)))
    failures = []
    if not options.json:
        sink.write_lines(summary_lines(result))
    if result["equality"]["differences"]:
        failures.append(f"{len(result['equality']['differences'])} texts differ from plain decoding")
    if threshold is not None:
        slower = sum(is_slower(row, threshold) for row in result["rows"])
        failures += [f"{slower} rows are slower than plain decoding"] if slower else []
    if not result["rows"]:
        failures.append("nothing was measured: every reply ended at its first token")
    if unsaved is not None and (interrupted or not failures):
        return _fail(unsaved, session, options)
    if not failures or interrupted:
        return 0
    if unsaved is not None:
        write_error(unsaved, session.console, as_json=False)
    return _fail(CheckFailedError("; ".join(failures), fix=["spd explain, spd verify"]), session, options)


def _fail(failure: SpdError, session: Session, options: BenchOptions) -> int:
    """Tell of a failure once the result stands on stdout; with --json that is the one object there."""
    if not options.json:
        raise failure
    write_error(failure, session.console, as_json=False)
    return failure.exit_code


def is_slower(row: dict[str, Any], threshold: float) -> bool:
    """Whether a row is slower than plain decoding by more than a share, and that is no noise."""
    from spd.runtime.lab import verdict

    ratio = row["speed_up"]
    return ratio is not None and verdict(ratio) == "slower" and ratio["median"] < 1 - threshold


def bench_result(options: BenchOptions, sweep: Sweep, *, interrupted: bool) -> dict[str, Any]:
    """The object of `spd bench --json`; its schema is shipped in `spd/runtime/lab/schemas`."""
    from spd.cli.text.report import versions
    from spd.runtime.lab import describe_machine, make_rows

    samples = list(sweep.samples)
    return {
        "schema": SCHEMA,
        "model": options.model,
        "versions": versions(),
        "machine": describe_machine(),
        "settings": {**asdict(sweep.settings), "draft_model": options.draft_model},
        "prompts": {q.prompt.name: q.prompt.digest for q in sweep.questions},
        "plans": [sweep.plans[index] for index in sorted(sweep.plans)],
        "rows": make_rows(samples, sweep.plans, sweep.floors, sweep.read_rate),
        "equality": {"tokens": sweep.compared, "differences": sweep.differences},
        "samples": [{**asdict(sample), "speed": sample.speed} for sample in samples],
        "interrupted": interrupted,
    }

"""Every option of every command, once: names, help, panels, defaults.

Commands receive one frozen object. A default of None means "not given", which the table of
conflicts and the model's own defaults rely on. Nothing heavy is imported here, and no method is
generated that is never called: that is a fifth of the time until `--help`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spd.cli.batch_options import BatchOptions, GrammarOptions, TemplateOptions
from spd.cli.output import Console
from spd.cli.signals import SignalGuard


def parse_spec(text: str) -> str:
    """`mtp` or, in any order, `mtp,ngram` or `mtp+ngram`, as the engine calls it. Raises BadParameter."""
    known, method = spec_names(""), in_order(text)
    if method not in known:
        alone = ", ".join(repr(name) for name in known if "+" not in name)
        raise typer.BadParameter(
            f"{text!r} is not one of {alone}, nor one of these beside lookup: 'mtp,ngram'"
        )
    return method


def in_order(text: str) -> str:
    """Two methods with lookup as the second, joined by a plus; whether there are such is not asked."""
    return "+".join(sorted((part.strip() for part in re.split("[,+]", text)), key="ngram".__eq__))


def spec_names(incomplete: str) -> list[str]:
    """What TAB offers for a method."""
    from spd.runtime.plan.config import ARBITRATED, SPEC_METHODS

    return [*SPEC_METHODS, *ARBITRATED]


_prompt = functools.partial(typer.Option, rich_help_panel="Prompt")
_model = functools.partial(typer.Option, rich_help_panel="Model")
_speculation = functools.partial(typer.Option, rich_help_panel="Speculation")
_sampling = functools.partial(typer.Option, rich_help_panel="Sampling")
_output = functools.partial(typer.Option, rich_help_panel="Output")
_advanced = functools.partial(typer.Option, rich_help_panel="Advanced")


def parse_size(text: str) -> int:
    """A count such as 4096, 8k or 32K (k = 1024)."""
    match = re.fullmatch(r"([0-9]{1,12})([kK]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096, 8k or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def model_names(incomplete: str) -> list[str]:
    """What TAB offers for a model: the demo and what the local cache holds; never an error."""
    try:
        from spd.formats.hub import list_cached_models

        return sorted({"demo", *list_cached_models()})
    except Exception:
        return ["demo"]


def cached_names(incomplete: str) -> list[str]:
    """What TAB offers for a model to remove."""
    return [name for name in model_names(incomplete) if name != "demo"]


@dataclass(frozen=True)
class Session:
    """What a command gets from the application: where to talk and to keep state, the guard of the signals."""

    console: Console
    guard: SignalGuard
    state_folder: Path
    dumb_terminal: bool = False
    told: tuple[str, ...] = ()
    """What a verbose run says first."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class CommonOptions:
    """Flags that every command takes, before or after its name."""

    color: Annotated[Literal["auto", "always", "never"], _output("--color", help="Colour.")] = "auto"
    no_color: Annotated[bool, _output("--no-color", help="As --color never.")] = False
    quiet: Annotated[bool, _output("-q", "--quiet", help="No notes on stderr.")] = False
    verbose: Annotated[bool, _output("-v", "--verbose", help="Plan, seed and parameters on stderr.")] = False
    debug: Annotated[bool, _advanced("--debug", help="Tracebacks with errors (also SPD_DEBUG=1).")] = False
    offline: Annotated[bool, _advanced("--offline", help="Never ask the hub (also HF_HUB_OFFLINE=1).")] = (
        False
    )
    no_input: Annotated[bool, _advanced("--no-input", help="Never ask and never read a terminal.")] = False
    config: Annotated[
        str | None, _advanced(metavar="FILE", help="Options from a TOML file, not from your config.toml.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelOptions:
    """Which model, where and how it runs."""

    model: Annotated[
        str,
        _model(
            "-m",
            "--model",
            envvar="SPD_MODEL",
            autocompletion=model_names,
            metavar="MODEL",
            help="A folder, org/name from the local Hugging Face cache, or demo.",
        ),
    ] = "demo"
    revision: Annotated[str | None, _model(metavar="REV", help="Branch, tag or commit in the cache.")] = None
    device: Annotated[str, _model(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], _model(help="Arithmetic of the weights.")
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8"], _model(help="int8: round the layers' weights at load. Changes the text.")
    ] = "none"
    ctx: Annotated[
        int | None,
        _model(parser=parse_size, metavar="N", help="Context in tokens, such as 8k. Default: the model's."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class MachineOptions:
    """What the machine gives."""

    kernels: Annotated[Literal["auto", "torch", "native", "triton"], _advanced(help="Whose arithmetic.")] = (
        "auto"
    )
    memory_fraction: Annotated[
        float, _advanced(metavar="F", help="Share of device memory to use, above 0 to 1.")
    ] = 0.9
    threads: Annotated[int | None, _advanced(metavar="N", help="CPU threads.")] = None
    load: Annotated[
        Literal["auto", "dummy"],
        _advanced(help="dummy: random weights of the configured shapes, for speed only."),
    ] = "auto"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class PullOption:
    """Consent to a download."""

    pull: Annotated[bool, _model("--pull", help="Download org/name if it is not in the cache.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class AdvancedOptions(MachineOptions):
    """How the machine is used."""

    graphs: Annotated[Literal["auto", "on", "off"], _advanced(help="Capture CUDA graphs.")] = "auto"
    lag: Annotated[
        Literal["auto", "0", "1", "2"], _advanced(help="Rounds the host may run behind the device.")
    ] = "auto"
    tp: Annotated[int, _advanced(metavar="N", help="Tensor parallel ranks.")] = 1
    draft_tp: Annotated[int | None, _advanced(metavar="N", help="Ranks that share the drafter.")] = None
    rendezvous: Annotated[str | None, _advanced(metavar="ADDRESS", help="Where ranks meet.")] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SpeculationOptions:
    """What proposes tokens and how many. Only --verify touches the text, and never how likely one is."""

    spec: Annotated[
        str,
        _speculation(
            parser=parse_spec,
            autocompletion=spec_names,
            metavar="METHOD",
            help="auto, off, mtp, draft, eagle3 or ngram proposes tokens, or two of them: mtp,ngram. "
            "The text is the same with each.",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _speculation(
            autocompletion=model_names,
            metavar="MODEL",
            help="A smaller model of the same vocabulary, or an EAGLE-3 head.",
        ),
    ] = None
    mtp: Annotated[
        str | None,
        _speculation(autocompletion=model_names, metavar="HEAD", help="A folder with an MTP head."),
    ] = None
    draft_max: Annotated[
        int | None,
        _speculation(
            metavar="K", help="Draft tokens a round at most; above a model's usual number lookup's beside it."
        ),
    ] = None
    adaptive: Annotated[
        bool | None, _speculation("--adaptive/--no-adaptive", help="Fit K to what is accepted, down to 0.")
    ] = None
    synthetic_acceptance: Annotated[
        float | None,
        _speculation(metavar="LENGTH", help="Impose this many tokens a round: for speed, the text is noise."),
    ] = None
    draft_ctx: Annotated[
        int | None,
        _speculation(parser=parse_size, metavar="N", help="Context of the draft model; no drafts beyond."),
    ] = None
    ngram_min: Annotated[
        int | None, _speculation(metavar="N", help="Shortest match. Default: 3; beside another method, 5.")
    ] = None
    ngram_max: Annotated[int | None, _speculation(metavar="N", help="Longest match. Default: 8.")] = None
    verify: Annotated[
        Literal["coupled", "rejection", "block"],
        _speculation(
            metavar="RULE",
            help="coupled: the text stays the same. rejection, block: as likely a text, K fixed.",
        ),
    ] = "coupled"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SamplingOptions:
    """How tokens are drawn; what is not given comes from the model's generation_config.json."""

    temperature: Annotated[
        float | None, _sampling(metavar="T", help="0 is greedy. Default: the model's, else 0.7.")
    ] = None
    top_p: Annotated[float | None, _sampling(metavar="P", help="Default: the model's, else 1.")] = None
    top_k: Annotated[int | None, _sampling(metavar="K", help="0 is off. Default: the model's, else 0.")] = (
        None
    )
    min_p: Annotated[float | None, _sampling(metavar="P", help="0 is off. Default: the model's, else 0.")] = (
        None
    )
    repetition_penalty: Annotated[
        float | None, _sampling(metavar="X", help="1 is off. Default: the model's, else 1.")
    ] = None
    presence_penalty: Annotated[
        float, _sampling(metavar="X", help="Subtracted once a token has been generated.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _sampling(metavar="X", help="Subtracted for each time it has been.")
    ] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling(metavar="ID=VALUE", help="Add VALUE to a token's logit. Repeatable.")
    ] = None
    min_tokens: Annotated[int, _sampling(metavar="N", help="No end of text before N tokens.")] = 0
    max_tokens: Annotated[
        int | None,
        _sampling("-n", "--max-tokens", metavar="N", help="Stop after N tokens. Default: the context."),
    ] = None
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="Stop before TEXT; \\n is a newline. Repeatable.")
    ] = None
    stop_token_id: Annotated[
        list[int] | None, _sampling(metavar="ID", help="Stop at a token. Repeatable.")
    ] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Do not stop at the end of text.")] = False
    seed: Annotated[
        int | None, _sampling(metavar="N", help="Repeat a reply. Default: a new one, see -v.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class PromptOptions(TemplateOptions):
    """What is asked."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; it follows stdin and files.")
    ] = None
    prompt_option: Annotated[
        str | None, _prompt("-p", "--prompt", metavar="TEXT", help="As the PROMPT argument.")
    ] = None
    file: Annotated[
        list[str] | None,
        _prompt("-f", "--file", metavar="FILE", help="Text from a file, - is stdin. Repeatable."),
    ] = None
    system: Annotated[str | None, _prompt("-s", "--system", metavar="TEXT", help="System message.")] = None
    system_file: Annotated[str | None, _prompt(metavar="FILE", help="System message from a file.")] = None
    messages: Annotated[
        str | None, _prompt(metavar="FILE", help="A chat as JSON: role and content each.")
    ] = None
    raw: Annotated[bool, _prompt("--raw", help="No chat template: continue the text.")] = False
    parse_special: Annotated[
        bool, _prompt("--parse-special", help="With --raw: read special tokens in the text.")
    ] = False
    prompt_ids: Annotated[str | None, _prompt(metavar="1,2,3", help="Token ids instead of text.")] = None
    overflow: Annotated[
        Literal["error", "truncate-left"],
        _prompt(help="A prompt too long is refused, or loses its oldest tokens."),
    ] = "error"
    dry_run: Annotated[
        bool, _prompt("--dry-run", help="Show the prompt and its tokens; load no weights.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class OutputOptions:
    """What comes back and where."""

    json: Annotated[bool, _output("--json", help="One JSON object: text, tokens, timings, acceptance.")] = (
        False
    )
    stream: Annotated[
        bool | None, _output("--stream/--no-stream", help="Text as it comes, or all at the end.")
    ] = None
    output: Annotated[
        Path | None, _output("-o", "--output", metavar="FILE", help="Write there, not to stdout.")
    ] = None
    logprobs: Annotated[
        int | None, _output(metavar="N", help="With --json: log-probabilities, and the N likeliest tokens.")
    ] = None
    stats: Annotated[bool, _output("--stats", help="Speed and acceptance on stderr at the end.")] = False
    trace: Annotated[
        Path | None, _output(metavar="FILE", help="What ran, then one JSON line a round, for spd explain.")
    ] = None
    explain: Annotated[
        bool, _output("--explain", help="Why speculation pays or not, on stderr at the end.")
    ] = False
    profile: Annotated[
        Path | None, _output(metavar="DIR", help="A Chrome trace with named ranges, and a summary.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerateOptions(
    AdvancedOptions,
    BatchOptions,
    CommonOptions,
    GrammarOptions,
    OutputOptions,
    SamplingOptions,
    SpeculationOptions,
    PullOption,
    ModelOptions,
    PromptOptions,
):
    """Everything `spd generate` takes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InspectOptions(CommonOptions):
    """Everything `spd inspect` takes."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            envvar="SPD_MODEL",
            autocompletion=model_names,
            help="A folder, org/name, or demo.",
        ),
    ] = "demo"
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--draft-model",
            autocompletion=model_names,
            metavar="MODEL",
            help="Check it as a draft model.",
        ),
    ] = None
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit in the cache.")
    ] = None
    quantize: Annotated[
        Literal["none", "int8"], typer.Option(help="Count what it needs with --quantize int8.")
    ] = "none"
    tp: Annotated[int, typer.Option(metavar="N", help="Tell the memory of one of N ranks.")] = 1
    draft_tp: Annotated[int | None, typer.Option(metavar="N", help="Ranks that share the drafter.")] = None
    json: Annotated[bool, _output("--json", help="One JSON object.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(CommonOptions):
    """Everything `spd doctor` takes."""

    quick: Annotated[bool, _output("--quick", help="Look only: compile and generate nothing.")] = False
    json: Annotated[bool, _output("--json", help="One JSON object: every check with its facts.")] = False
    bug_report: Annotated[
        Path | None,
        _output(metavar="FILE", help="Write versions, plan and checks there, without names and secrets."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOptions(CommonOptions):
    """Everything `spd completions` takes."""

    shell: Annotated[
        Literal["bash", "zsh", "fish", "powershell"], typer.Argument(metavar="SHELL", help="Whose script.")
    ]


def as_utf8(value: Any) -> Any:
    """Text, or texts, read as UTF-8 where the locale is of fewer letters; else as it is."""
    if isinstance(value, (list, tuple)):
        return [as_utf8(each) for each in value]
    if not isinstance(value, str) or value.isascii():
        return value
    try:
        return value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return value

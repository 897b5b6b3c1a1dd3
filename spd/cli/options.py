"""Every option of every command, once: names, help, panels, defaults.

Commands receive one frozen object. A default of None means "not given", which the table of
conflicts and the model's own defaults rely on. Nothing heavy is imported here, and no method is
generated that is never called: that is a fifth of the time until `--help`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from spd.cli.help import FIRST, IN, LAST, OTHER
from spd.cli.signals import SignalGuard
from spd.cli.text.output import Console
from spd.errors import UsageError
from spd.runtime.plan.config import ARBITRATED, METHODS


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
    return [*METHODS, *ARBITRATED]


_first = functools.partial(typer.Option, rich_help_panel=FIRST)
_prompt = functools.partial(typer.Option, rich_help_panel=IN)
_model = functools.partial(typer.Option, rich_help_panel="Model and drafts")
_speculation = functools.partial(typer.Option, rich_help_panel="Model and drafts")
_sampling = functools.partial(typer.Option, rich_help_panel=IN)
_output = functools.partial(typer.Option, rich_help_panel=OTHER)
_advanced = functools.partial(typer.Option, rich_help_panel=LAST)


def parse_size(text: str) -> int:
    """A count such as 4096, 8k or 32K (k = 1024)."""
    match = re.fullmatch(r"([0-9]{1,12})([kK]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096, 8k or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def model_names(incomplete: str) -> list[str]:
    """What TAB offers for a model: the demos and what the local cache holds; never an error."""
    from spd.formats.demo import DEMOS

    try:
        from spd.formats.hub import list_cached_models

        return sorted({*DEMOS, *list_cached_models()})
    except Exception:
        return list(DEMOS)


def cached_names(incomplete: str) -> list[str]:
    """What TAB offers for a model to remove."""
    from spd.formats.demo import DEMOS

    return [name for name in model_names(incomplete) if name not in DEMOS]


@dataclass(frozen=True)
class Session:
    """What a command gets from the application: where to talk and to keep state, the guard of the signals."""

    console: Console
    guard: SignalGuard
    state_folder: Path
    dumb_terminal: bool = False
    rendezvous: str | None = None
    """Where the ranks meet that torchrun has started."""
    told: tuple[str, ...] = ()
    """What a verbose run says first."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class CommonOptions:
    """Flags that every command takes, before or after its name."""

    color: Annotated[
        Literal["auto", "always", "never"], _output("--color", metavar="WHEN", help="auto, always or never.")
    ] = "auto"
    quiet: Annotated[bool, _output("-q", "--quiet", help="No notes on stderr.")] = False
    verbose: Annotated[
        int,
        _output("-v", "--verbose", count=True, help="Plan, seed and parameters on stderr; -vv: tracebacks."),
    ] = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelOptions:
    """Which model, where and how it runs."""

    model: Annotated[
        str,
        _first(
            "-m",
            "--model",
            envvar="SPD_MODEL",
            autocompletion=model_names,
            metavar="MODEL",
            help="A folder, org/name in the Hugging Face cache, demo or demo-hybrid.",
        ),
    ] = "demo"
    device: Annotated[str, _model(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        _model(metavar="TYPE", help="auto, bfloat16, float16 or float32."),
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8"],
        _model(metavar="FORM", help="int8: round the layers' weights at load. Changes the text."),
    ] = "none"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ContextOption:
    """How long prompt and reply may be together."""

    ctx: Annotated[
        int | None,
        _model(parser=parse_size, metavar="N", help="Context in tokens, such as 8k. Default: the model's."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class MachineOptions:
    """What the machine gives; where ranks meet that were started is found, not typed."""

    kernels: Annotated[
        Literal["auto", "torch", "native", "triton"],
        _advanced(metavar="SET", help="auto, torch, native or triton."),
    ] = "auto"
    threads: Annotated[int | None, _advanced(metavar="N", help="CPU threads.")] = None
    memory_fraction: float = 0.9
    load: str = "auto"
    synthetic_acceptance: float | None = None
    rendezvous: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class MemoryOption:
    """How much memory is used."""

    memory_fraction: Annotated[
        float, _advanced(metavar="F", help="Share of device memory to use, above 0 to 1. Default: 0.9.")
    ] = 0.9


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class PullOption:
    """Consent to a download."""

    pull: Annotated[bool, _model("--pull", help="Download org/name if it is not in the cache.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class AdvancedOptions(MachineOptions):
    """How the machine is used."""

    graphs: Annotated[
        Literal["auto", "on", "off"], _advanced(metavar="MODE", help="CUDA graphs: auto, on or off.")
    ] = "auto"
    lag: Annotated[
        Literal["auto", "0", "1", "2"],
        _advanced(metavar="N", help="Rounds the host may run behind: auto, 0, 1 or 2."),
    ] = "auto"
    tp: Annotated[int, _advanced(metavar="N", help="Tensor parallel ranks. Default: 1.")] = 1
    draft_tp: Annotated[int | None, _advanced(metavar="N", help="Ranks that share the drafter.")] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SpeculationOptions:
    """What proposes tokens and how many. Only --verify touches the text, and never how likely one is."""

    spec: Annotated[
        str,
        _first(
            parser=parse_spec,
            autocompletion=spec_names,
            metavar="METHOD",
            help=f"{', '.join(METHODS)}, or two: mtp,ngram.",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _first(
            autocompletion=model_names,
            metavar="MODEL",
            help="A smaller model of the same vocabulary, or an EAGLE-3 head.",
        ),
    ] = None
    mtp: Annotated[
        str | None,
        _speculation(autocompletion=model_names, metavar="HEAD", help="A folder with an MTP head."),
    ] = None
    draft_max: Annotated[int | None, _first(metavar="K", help="Draft tokens a round at most.")] = None
    adaptive: Annotated[
        bool | None, _speculation("--adaptive/--no-adaptive", help="Fit K to what is accepted, down to 0.")
    ] = None
    verify: Annotated[
        Literal["coupled", "rejection", "block"],
        _speculation(metavar="RULE", help="coupled: the same text; rejection, block: as likely a text."),
    ] = "coupled"
    draft_ctx: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class DraftContextOption:
    """How far a draft model goes."""

    draft_ctx: Annotated[
        int | None,
        _speculation(parser=parse_size, metavar="N", help="Context of the draft model; no drafts beyond."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SamplingOptions:
    """How tokens are drawn; what is not given comes from the model's generation_config.json.

    The most used have flags; the others are set by name, with --set or in a chat with /set.
    """

    temperature: Annotated[
        float | None, _first(metavar="T", help="0 is greedy. Default: the model's, else 0.7.")
    ] = None
    max_tokens: Annotated[
        int | None,
        _first("-n", "--max-tokens", metavar="N", help="Stop after N tokens. Default: the context."),
    ] = None
    seed: Annotated[
        int | None, _sampling(metavar="N", help="Repeat a reply. Default: a new one, see -v.")
    ] = None
    top_p: Annotated[float | None, _sampling(metavar="P", help="Default: the model's, else 1.")] = None
    stop: Annotated[
        list[str] | None, _sampling(metavar="TEXT", help="Stop before TEXT; \\n is a newline. Repeatable.")
    ] = None
    set: Annotated[
        list[str] | None,
        _sampling(
            metavar="NAME=VALUE", help="top_k, min_p, min_tokens, logit_bias or a penalty. Repeatable."
        ),
    ] = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] | None = None
    min_tokens: int = 0
    stop_token_id: list[int] | None = None
    ignore_eos: bool = False


def parse_think(text: str, name: str = "--think") -> str:
    """The value of --think, or of /think: a word, or tokens at most. Raises UsageError."""
    if text not in ("auto", "on", "off", "hide") and not re.fullmatch("[0-9]{1,9}", text):
        said = f"{name} {text}".rstrip()
        raise UsageError(f"{said}: on, off, hide or a number of tokens?", fix=[f"{name} on|off|hide|N"])
    return text


def think_words(incomplete: str) -> list[str]:
    """What TAB offers for --think."""
    return ["on", "off", "hide"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class TemplateOptions:
    """What the chat template is told, and what becomes of thinking."""

    template_arg: Annotated[
        list[str] | None, _prompt(metavar="K=V", help="A variable for the chat template. Repeatable.")
    ] = None
    think: Annotated[
        str,
        _first(
            parser=parse_think,
            autocompletion=think_words,
            metavar="on|off|hide|N",
            help="Thinking or none; hide: do not show it; N tokens at most.",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class GrammarOptions:
    """What the reply must look like."""

    schema: Annotated[
        str | None, _output(metavar="FILE|JSON", help="The reply is JSON that follows this JSON schema.")
    ] = None
    grammar: Annotated[
        str | None,
        _output(
            metavar="LARK|/REGEX/", help="The whole reply follows a Lark grammar (or its file), or matches."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class BatchOptions:
    """Many prompts in one run."""

    jsonl: Annotated[
        bool,
        _prompt("--jsonl", help="A prompt a line on stdin or in -f FILE, a JSON line each back."),
    ] = False
    concurrency: Annotated[
        int | None, _advanced(metavar="N", help="Lines of --jsonl that decode together. Default: 8.")
    ] = None
    resume: Annotated[
        bool, _output("--resume", help="With --jsonl -o FILE: go on behind what FILE holds.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class PromptOptions(TemplateOptions):
    """What is asked."""

    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; it follows stdin and files.")
    ] = None
    file: Annotated[
        list[str] | None,
        _first("-f", "--file", metavar="FILE", help="Text from a file, - is stdin. Repeatable."),
    ] = None
    system: Annotated[str | None, _first("-s", "--system", metavar="TEXT|@FILE", help="System message.")] = (
        None
    )
    messages: Annotated[
        str | None, _prompt(metavar="FILE", help="A chat as JSON: role and content each.")
    ] = None
    raw: Annotated[bool, _prompt("--raw", help="No chat template: continue the text.")] = False
    prompt_ids: Annotated[str | None, _prompt(metavar="1,2,3", help="Token ids instead of text.")] = None
    dry_run: Annotated[
        bool, _prompt("--dry-run", help="Show the prompt and its tokens; load no weights.")
    ] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class OutputOptions:
    """What comes back and where."""

    json: Annotated[bool, _first("--json", help="One JSON object: text, tokens, timings, acceptance.")] = (
        False
    )
    stats: Annotated[bool, _first("--stats", help="Speed and acceptance on stderr at the end.")] = False
    output: Annotated[
        Path | None, _output("-o", "--output", metavar="FILE", help="Write there, not to stdout.")
    ] = None
    logprobs: Annotated[
        int | None, _output(metavar="N", help="With --json: log-probabilities, the N likeliest tokens.")
    ] = None
    trace: Annotated[Path | None, _output(metavar="FILE", help="One JSON line a round, for spd explain.")] = (
        None
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerateOptions(
    MemoryOption,
    AdvancedOptions,
    BatchOptions,
    CommonOptions,
    GrammarOptions,
    OutputOptions,
    SamplingOptions,
    DraftContextOption,
    SpeculationOptions,
    PullOption,
    ContextOption,
    ModelOptions,
    PromptOptions,
):
    """Everything `spd generate` takes."""

    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Do not stop at the end of text.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InspectOptions(CommonOptions):
    """Everything `spd inspect` takes."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            envvar="SPD_MODEL",
            autocompletion=model_names,
            help="A folder, org/name, demo or demo-hybrid.",
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
        Literal["none", "int8"],
        typer.Option(metavar="FORM", help="Count what it needs with --quantize int8."),
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


def read_settings(words: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """`name=value` words as fields of SamplingOptions, by their types; lists grow. Raises UsageError."""
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{flag} {word} is not NAME=VALUE", fix=[f"{flag} temperature=0.5"])
        found = _setting(name, value, flag)
        changes[name] = [*changes.get(name, ()), *found] if isinstance(found, list) else found
    return changes


def _setting(name: str, text: str, flag: str) -> Any:
    """A sampling option's value from text, by the option's own type. Raises UsageError."""
    hints = get_type_hints(SamplingOptions)
    known = sorted(hints.keys() - {"set"})
    if name not in known:
        raise UsageError(f"{flag} {name}: there is no such parameter", fix=[f"one of {', '.join(known)}"])
    kinds = get_args(hints[name]) or (hints[name],)
    if type(None) in kinds and text in ("", "auto", "default"):
        return None
    if list[str] in kinds:
        return [text]
    if bool in kinds:
        return parse_switch(f"{flag} {name}", text)
    kind = float if float in kinds else int
    try:
        return [kind(text)] if list[int] in kinds else kind(text)
    except ValueError:
        raise UsageError(f"{flag} {name}={text}: is not a number", fix=[f"{flag} {name}=1"]) from None


def parse_switch(what: str, text: str) -> bool:
    """`on` or `off`. Raises UsageError."""
    known = {"on": True, "off": False, "true": True, "false": False}
    if text not in known:
        words = f"{text} is not on or off" if text else "on or off?"
        raise UsageError(f"{what}: {words}", fix=[f"{what} on|off"])
    return known[text]


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

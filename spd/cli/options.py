"""Options of more than one command: names, help, panels, defaults. Those of one stand beside its body.

Commands receive one frozen object. A default of None means "not given", which the table of
conflicts and the model's own defaults rely on. Nothing heavy is imported here, and no method is
generated that is never called: that is a fifth of the time until `--help`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from spd.cli.parser import FIRST, IN, LAST, OTHER, in_order, parse_as, parse_size
from spd.errors import UsageError
from spd.runtime.plan.config import ARBITRATED, METHODS

MODEL = "Model and drafts"
THINK = "on|off|hide|N"
MOST_PATHS = 200  # that TAB offers


def model_names(incomplete: str) -> list[str]:
    """Return what TAB offers for a model: the demos, what is stored here, GGUF files; never an error."""
    from spd.formats.demo import DEMOS

    try:
        from spd.formats.hub import list_models

        return [*sorted({*DEMOS, *(model.name for model in list_models())}), *_paths(incomplete)]
    except Exception:
        return list(DEMOS)


def _paths(incomplete: str) -> list[str]:
    """Return GGUF files that begin so, and folders where something is typed."""
    folder, name = incomplete.rpartition("/")[::2]
    folder = folder + "/" if "/" in incomplete else ""
    paths = []
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            is_hidden = entry.name.startswith(".") and not name.startswith(".")
            if is_hidden or not entry.name.startswith(name):
                continue
            if entry.name.lower().endswith(".gguf"):
                paths.append(f"{folder}{entry.name}")
            elif incomplete and entry.is_dir():
                paths.append(f"{folder}{entry.name}/")
    return sorted(paths)[:MOST_PATHS]


def spec_names(incomplete: str) -> list[str]:
    """What TAB offers for a method."""
    return [*METHODS, *ARBITRATED]


COMPLETED: dict[str | None, Any] = {
    "METHOD": spec_names,
    "METHODS": spec_names,
    THINK: lambda: ["on", "off", "hide"],
}
COMPLETED |= dict.fromkeys(("MODEL", "MODEL…", "MODEL,…", "HEAD"), model_names)
"""What TAB offers for values that are called so."""


def _shown(metavar: str | None, help: str, more: dict[str, Any]) -> dict[str, Any]:
    """What Typer is told of a parameter."""
    completed = {"autocompletion": COMPLETED[metavar]} if metavar in COMPLETED else {}
    return {**completed, **more, "metavar": metavar, "help": help, "show_default": False}


def option(
    panel: str, default: Any, metavar: str | None, help: str, *names: str, **more: Any
) -> Any:
    """A field that is an option, called as its field unless `names` hold a long one; no metavar: a flag."""
    shown = {**_shown(metavar, help, more), "rich_help_panel": panel}
    return dataclasses.field(default=default, metadata={"names": names, "option": shown})


def argument(metavar: str, help: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A field that is an argument; without a default it has to be given."""
    return dataclasses.field(
        default=default, metadata={"names": None, "option": _shown(metavar, help, more)}
    )


first, inputs, printed, advanced = (partial(option, panel) for panel in (FIRST, IN, OTHER, LAST))
_model = partial(option, MODEL)


def parse_spec(text: str) -> str:
    """Return `mtp` or `mtp+ngram`, also written `ngram,mtp`, as the engine calls it. Raises BadParameter."""
    known = spec_names("")
    method = in_order(text)
    if method not in known:
        alone = ", ".join(repr(name) for name in known if "+" not in name)
        words = f"{text!r} is not one of {alone}, nor one of these beside lookup: 'mtp+ngram'"
        raise typer.BadParameter(words)
    return method


def parse_think(text: str, name: str = "--think") -> str:
    """The value of --think, or of /think: a word, or tokens at most. Raises UsageError."""
    if text not in ("auto", "on", "off", "hide") and not re.fullmatch("[0-9]{1,9}", text):
        said = f"{name} {text}".rstrip()
        raise UsageError(
            f"{said}: on, off, hide or a number of tokens?", fix=[f"{name} on|off|hide|N"]
        )
    return text


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class CommonOptions:
    """Flags that every command takes, before or after its name."""

    color: Literal["auto", "always", "never"] = printed("auto", "WHEN", "auto, always or never.")
    quiet: bool = printed(False, None, "No notes on stderr.", "-q")
    verbose: int = printed(
        0, None, "Plan, seed and parameters on stderr; -vv: tracebacks.", "-v", count=True
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JsonOptions(CommonOptions):
    """What commands with one result share."""

    json: bool = printed(False, None, "One JSON object.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelArgument:
    """The model in the place of --model: every command but `generate` takes both."""

    model_argument: str | None = argument("MODEL", "A folder, GGUF file, org/name or demo.", None)
    typed: frozenset[str] = frozenset()
    """Names of these fields that stood on the command line, not in a file or the environment."""


def same_as_argument(default: str = "", envvar: str | None = None) -> Any:
    """Return the field `model` of a command that runs nothing; without a default a model must be typed."""
    return printed(default, "MODEL", "The same as the argument.", "-m", envvar=envvar)


def take_model(values: dict[str, Any], typed: Collection[str]) -> None:
    """Let the MODEL argument stand for --model in the `values` of a command.

    typed: names of the values that stood on the command line. Where a folder to write is the second
    argument, --model leaves the first for it. Raises UsageError for two models, and for none.
    """
    if "model_argument" not in values:
        return
    argument = values["model_argument"]
    model = values["model"] if "model" in typed else None
    if None not in (argument, model) and argument != model:
        if values.get("destination", argument) is not None:
            words = "the model is given twice: as an argument and with --model"
            raise UsageError(words, fix=["use one of them"], code="conflict")
        values["destination"] = Path(argument)
        argument = model
    if argument is None and model is None and not values["model"]:
        raise UsageError("missing argument 'MODEL'")
    if argument is not None:
        values["model"] = argument


def take_models(arguments: Sequence[str] | None, model: str) -> list[str]:
    """Return the models of a command that takes many: arguments and --model. Raises UsageError for none."""
    models = [*(arguments or ()), *([model] if model else [])]
    if not models:
        raise UsageError("missing argument 'MODEL…'")
    return models


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelOptions(CommonOptions):
    """Which model, and where it runs."""

    model: str = first(
        "demo", "MODEL", "A folder, GGUF file, org/name or demo.", "-m", envvar="SPD_MODEL"
    )
    device: str = _model("auto", "DEVICE", "auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = _model(
        "auto", "TYPE", "auto, bfloat16, float16 or float32."
    )
    quantize: Literal["none", "int8", "int4"] = _model(
        "none", "FORM", "int8, int4: round the layers' weights at load. Changes the text."
    )
    kernels: Literal["auto", "torch", "native", "triton"] = advanced(
        "auto", "SET", "auto, torch, native or triton."
    )
    threads: int | None = advanced(None, "N", "CPU threads.")
    rendezvous: int | None = None
    """How many ranks torchrun has started: found, not typed."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class EngineOptions(ModelOptions):
    """What proposes tokens, and how the machine is used. Of these only --verify touches the text."""

    spec: str = first(
        "auto", "METHOD", f"{', '.join(METHODS)}, or two: mtp+ngram.", parser=parse_spec
    )
    draft_model: str | None = first(
        None, "MODEL", "A smaller model of the same vocabulary, an EAGLE-3 head or an assistant."
    )
    draft_max: int | None = first(None, "K", "Most draft tokens in a round.")
    mtp: str | None = _model(None, "HEAD", "A folder with an MTP head.")
    adaptive: bool | None = _model(
        None, None, "Adapt K to what is accepted.", "--adaptive/--no-adaptive"
    )
    verify: Literal["coupled", "rejection", "block"] = _model(
        "coupled", "RULE", "coupled: the same text; rejection, block: a text as likely."
    )
    graphs: Literal["auto", "on", "off"] = advanced("auto", "MODE", "CUDA graphs: auto, on or off.")
    lag: Literal["auto", "0", "1", "2"] = advanced(
        "auto", "N", "Rounds the host may lag: auto, 0, 1 or 2."
    )
    tp: int = advanced(1, "N", "Tensor parallel ranks. Default: 1.")
    draft_tp: int | None = advanced(None, "N", "Ranks that share the drafter.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class RunOptions(EngineOptions):
    """What `generate`, `chat` and `serve` share."""

    ctx: int | None = _model(
        None, "N", "Context in tokens: 8k. Default: the model's.", parser=parse_size
    )
    pull: bool = _model(False, None, "Download org/name if it is not in the cache.")
    memory_fraction: float = advanced(
        0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SamplingOptions:
    """How tokens are drawn: by flags, --set and /set, else by the model's generation_config.json."""

    temperature: float | None = first(None, "T", "0 is greedy. Default: the model's, else 0.7.")
    max_tokens: int | None = first(None, "N", "Stop after N tokens. Default: the context.", "-n")
    seed: int | None = inputs(None, "N", "Repeats a reply. Default: random; -v shows it.")
    top_p: float | None = inputs(None, "P", "Default: the model's, else 1.")
    stop: list[str] | None = inputs(None, "TEXT", "Stop before TEXT; \\n is a newline. Repeatable.")
    set: list[str] | None = inputs(
        None, "NAME=VALUE", "top_k, min_p, min_tokens, logit_bias or a penalty. Repeatable."
    )
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[str] | None = None
    min_tokens: int = 0
    stop_token_id: list[int] | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ReplyOptions(SamplingOptions, RunOptions):
    """What `generate` and `chat` share."""

    template_arg: list[str] | None = inputs(
        None, "K=V", "A variable for the chat template. Repeatable."
    )
    think: str = first(
        "auto", THINK, "Think or not; hide: unseen; N: at most N tokens.", parser=parse_think
    )
    system: str | None = first(None, "TEXT|@FILE", "System message.", "-s")
    no_server: bool = printed(False, None, "Do not use a running spd serve.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerateOptions(ReplyOptions):
    """Everything `spd generate` takes."""

    prompt: str | None = argument("PROMPT", "The prompt. Stdin and files come before it.", None)
    file: list[str] | None = first(None, "FILE", "Text from a file, - is stdin. Repeatable.", "-f")
    messages: str | None = inputs(None, "FILE", "A chat as JSON: a list of role and content.")
    raw: bool = inputs(False, None, "No chat template: continue the text.")
    prompt_ids: str | None = inputs(None, "1,2,3", "Token ids instead of text.")
    dry_run: bool = inputs(False, None, "Show the prompt and its tokens; load no weights.")
    ignore_eos: bool = inputs(False, None, "Do not stop at the end of text.")
    jsonl: bool = inputs(
        False, None, "One prompt a line on stdin or in -f FILE, one JSON line out for each."
    )
    json: bool = first(False, None, "One JSON object: text, tokens, timings, acceptance.")
    stats: bool = first(
        False, None, "Speed and acceptance on stderr at the end; of --jsonl, the speed."
    )
    output: Path | None = printed(None, "FILE", "Write there, not to stdout.", "-o")
    schema: str | None = printed(
        None, "FILE|JSON", "The reply is JSON that follows this JSON schema."
    )
    grammar: str | None = printed(
        None, "LARK|/REGEX/", "The reply follows a Lark grammar (or its file), or matches REGEX."
    )
    logprobs: int | None = printed(
        None, "N", "With --json: log-probabilities, the N likeliest tokens."
    )
    trace: Path | None = printed(None, "FILE", "One JSON line for each round, for spd explain.")
    resume: bool = printed(False, None, "With --jsonl -o FILE: continue after the answers in FILE.")
    concurrency: int | None = advanced(
        None, "N", "Lines of --jsonl at a time. Default: 8.", min=1, max=1024
    )


def read_settings(words: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """`name=value` words as fields of SamplingOptions, by their types; lists grow. Raises UsageError."""
    kinds = {
        each.name: str(each.type)
        for each in dataclasses.fields(SamplingOptions)
        if each.name != "set"
    }
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"{flag} {word} is not NAME=VALUE", fix=[f"{flag} temperature=0.5"])
        if name not in kinds:
            fix = [f"one of {', '.join(sorted(kinds))}"]
            raise UsageError(f"{flag} {name}: there is no such parameter", fix=fix)
        if value in ("", "auto", "default"):
            changes[name] = getattr(SamplingOptions, name)
            continue
        found = parse_as(f"{flag} {name}", kinds[name], value)
        changes[name] = [*(changes.get(name) or ()), found] if "list" in kinds[name] else found
    return changes

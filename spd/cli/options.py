"""Options of several commands: names, help, panels, defaults; those of one are in its module.

Commands receive one frozen object. A default of None means that the option is not set, which the
table of conflicts and the model's defaults rely on. Nothing heavy is imported here, and no unused
dataclass method is generated: that is a fifth of the time until `--help`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from spd.cli.parser import (
    ADVANCED_PANEL,
    INPUT_PANEL,
    MAIN_PANEL,
    OUTPUT_PANEL,
    bad_value,
    normalize_spec,
    parse_token_count,
    parse_value,
)
from spd.errors import UsageError
from spd.runtime.plan.config import ARBITRATED_SPECS, METHODS

MODEL_PANEL = "Model and drafts"
"""The panel of the help with options of the model and of its drafter."""
THINK_METAVAR = "on|off|hide|N"
"""The values of --think, as the help shows them."""
DRAFT_MODEL_HELP = "A smaller model, an MTP or EAGLE-3 head, a block drafter or an assistant."
MAX_PATHS = 200
"""Paths that a completion offers."""


def model_completions(incomplete: str) -> list[str]:
    """Return completions for a model: demos, stored models, and files and folders; never raise.

    incomplete: what is typed; only files and folders are chosen by it.
    """
    from spd.formats.demo import DEMOS

    try:
        from spd.formats.hub import list_models

        return [
            *sorted({*DEMOS, *(model.name for model in list_models())}),
            *_complete_paths(incomplete),
        ]
    except Exception:
        return list(DEMOS)


def _complete_paths(incomplete: str) -> list[str]:
    """Return GGUF files whose paths begin with `incomplete`, and folders unless it is empty."""
    folder, name = incomplete.rpartition("/")[::2]
    folder = folder + "/" if "/" in incomplete else ""
    paths = []
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as folder_entries:
        for entry in folder_entries:
            is_hidden = entry.name.startswith(".") and not name.startswith(".")
            if is_hidden or not entry.name.startswith(name):
                continue
            if entry.name.lower().endswith(".gguf"):
                paths.append(f"{folder}{entry.name}")
            elif incomplete and entry.is_dir():
                paths.append(f"{folder}{entry.name}/")
    return sorted(paths)[:MAX_PATHS]


def spec_names(incomplete: str) -> list[str]:
    """Return the names of all methods, single and combined; `incomplete` is ignored."""
    return [*METHODS, *ARBITRATED_SPECS]


COMPLETERS: dict[str | None, Callable[[str], list[str]] | Callable[[], list[str]]] = {
    "METHOD": spec_names,
    "METHODS": spec_names,
    THINK_METAVAR: lambda: ["on", "off", "hide"],
}
COMPLETERS |= dict.fromkeys(("MODEL", "MODEL…", "MODEL,…"), model_completions)
"""Completion functions by the metavar of an option or argument."""


def _typer_settings(
    metavar: str | None, help: str, typer_settings: dict[str, object]
) -> dict[str, object]:
    """Return the keywords for `typer.Option` or `typer.Argument`."""
    completer = {"autocompletion": COMPLETERS[metavar]} if metavar in COMPLETERS else {}
    return {**completer, **typer_settings, "metavar": metavar, "help": help, "show_default": False}


def option(
    panel: str,
    default: object,
    metavar: str | None,
    help: str,
    *names: str,
    **typer_settings: object,
) -> Any:
    """Return a dataclass field that is an option; without a metavar it is a flag.

    names: short names, and a long name if it is not that of the field.
    """
    settings = {**_typer_settings(metavar, help, typer_settings), "rich_help_panel": panel}
    return dataclasses.field(default=default, metadata={"names": names, "option": settings})


def argument(
    metavar: str, help: str, default: object = dataclasses.MISSING, **typer_settings: object
) -> Any:
    """Return a dataclass field that is an argument; without a default it is required."""
    return dataclasses.field(
        default=default,
        metadata={"names": None, "option": _typer_settings(metavar, help, typer_settings)},
    )


main_option = partial(option, MAIN_PANEL)
input_option = partial(option, INPUT_PANEL)
output_option = partial(option, OUTPUT_PANEL)
advanced_option = partial(option, ADVANCED_PANEL)
model_option = partial(option, MODEL_PANEL)
"""Each returns the field of an option in one panel of the help."""


def parse_spec(text: str) -> str:
    """Return the engine's name of a method: `mtp`, or `mtp+ngram` for `ngram,mtp`.

    Raises BadParameter.
    """
    methods = spec_names("")
    method = normalize_spec(text)
    if method not in methods:
        single_methods = ", ".join(repr(name) for name in methods if "+" not in name)
        message = (
            f"{text!r} is not one of {single_methods}, nor one of these beside lookup: 'mtp+ngram'"
        )
        raise bad_value(message)
    return method


def parse_think(text: str, name: str = "--think") -> str:
    """Return a value of --think or /think as it is.

    Raises UsageError unless it is a word or a number. name: the option or command, for errors.
    """
    if text not in ("auto", "on", "off", "hide") and not re.fullmatch("[0-9]{1,9}", text):
        typed = f"{name} {text}".rstrip()
        raise UsageError(
            f"{typed}: on, off, hide or a number of tokens?", fix=[f"{name} on|off|hide|N"]
        )
    return text


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class CommonOptions:
    """Flags that every command takes, before or after its name."""

    color: Literal["auto", "always", "never"] = output_option(
        "auto", "WHEN", "auto, always or never."
    )
    quiet: bool = output_option(False, None, "No notes on stderr.", "-q")
    verbose: int = output_option(
        0, None, "Plan, seed and parameters on stderr; -vv: tracebacks.", "-v", count=True
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JsonOptions(CommonOptions):
    """Options of commands with one result."""

    json: bool = output_option(False, None, "One JSON object.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelArgument:
    """The model as an argument instead of --model: every command but `generate` takes both."""

    model_argument: str | None = argument("MODEL", "A folder, GGUF file, org/name or demo.", None)
    typed: frozenset[str] = frozenset()
    """Names of the fields that were on the command line, not in a file or the environment."""


def same_as_argument(default: str = "", envvar: str | None = None) -> Any:
    """Return the field `model` of a command that runs no model.

    Without a default it is required.
    """
    return output_option(default, "MODEL", "The same as the argument.", "-m", envvar=envvar)


def is_url(model: str | None) -> bool:
    """True if a model is the address of a server, not of a page of the hub."""
    if model is None or not model.lower().startswith(("http://", "https://")):
        return False
    from spd.formats.hub import is_hub_address

    return not is_hub_address(model)


def separate_served_model(values: dict[str, Any], typed: Collection[str]) -> None:
    """Store --model as `served_model` where the MODEL argument is a server's address, in place.

    values: those of a command; `model` becomes the address. typed: names of those that were typed.
    """
    is_server = is_url(values["model_argument"])
    values["served_model"] = values["model"] if is_server and "model" in typed else None
    if is_server:
        values["model"] = values["model_argument"]


def merge_model_argument(values: dict[str, Any], typed: Collection[str]) -> None:
    """Store the MODEL argument as --model in the `values` of a command, in place.

    typed: names of the values that were on the command line. If the second argument is a folder to
    write and --model is typed, the first argument is that folder. Raises UsageError for two models
    and for none.
    """
    if "model_argument" not in values:
        return
    model_argument = values["model_argument"]
    model = values["model"] if "model" in typed else None
    if None not in (model_argument, model) and model_argument != model:
        if values.get("destination", model_argument) is not None:
            message = "the model is given twice: as an argument and with --model"
            raise UsageError(message, fix=["use one of them"], code="conflict")
        values["destination"] = Path(model_argument)
        model_argument = model
    if model_argument is None and model is None and not values["model"]:
        raise UsageError("missing argument 'MODEL'")
    if model_argument is not None:
        values["model"] = model_argument


def merge_model_arguments(arguments: Sequence[str] | None, model: str) -> list[str]:
    """Return the models of a command that takes several: arguments, then --model unless empty.

    Raises UsageError for none.
    """
    models = [*(arguments or ()), *([model] if model else [])]
    if not models:
        raise UsageError("missing argument 'MODEL…'")
    return models


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ModelOptions(CommonOptions):
    """The model and the device."""

    model: str = main_option(
        "demo", "MODEL", "A folder, GGUF file, org/name or demo.", "-m", envvar="SPD_MODEL"
    )
    device: str = model_option("auto", "DEVICE", "auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = model_option(
        "auto", "TYPE", "auto, bfloat16, float16 or float32."
    )
    quantize: Literal["none", "int8", "int4"] = model_option(
        "none", "FORM", "int8, int4: round weights at load. Changes the text."
    )
    activations: Literal["whole", "int8"] = model_option(
        "whole", "FORM", "int8: round activations too, on a CPU. Changes the text."
    )
    kv: Literal["auto", "int8"] = model_option(
        "auto", "FORM", "int8: the cache in 8 bits. Changes the text."
    )
    kernels: Literal["auto", "torch", "native", "triton"] = advanced_option(
        "auto", "SET", "auto, torch, native or triton."
    )
    threads: int | None = advanced_option(None, "N", "CPU threads.")
    rendezvous: int | None = None
    """The number of ranks that torchrun has started; no option."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class EngineOptions(ModelOptions):
    """The proposer and the use of the machine. Of these options only --verify affects the text."""

    spec: str = main_option(
        "auto", "METHOD", f"{', '.join(METHODS)}; two: mtp+ngram", parser=parse_spec
    )
    draft_model: str | None = main_option(None, "MODEL", DRAFT_MODEL_HELP)
    draft_max: int | None = main_option(None, "K", "Most draft tokens in a round.")
    adaptive: bool | None = None
    """An option of `generate` and `chat` alone: neither a server nor a check measures."""
    verify: Literal["coupled", "rejection", "block"] = model_option(
        "coupled", "RULE", "coupled: the same text; rejection, block: a text as likely."
    )
    graphs: Literal["auto", "on", "off"] = advanced_option(
        "auto", "MODE", "CUDA graphs: auto, on or off."
    )
    lag: Literal["auto", "0", "1", "2"] = advanced_option(
        "auto", "N", "Rounds the host may lag: auto, 0, 1 or 2."
    )
    tp: int = advanced_option(1, "N", "Tensor parallel ranks. Default: 1.")
    draft_tp: int | None = advanced_option(None, "N", "Ranks that share the drafter.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class RunOptions(EngineOptions):
    """Options of `generate`, `chat` and `serve`."""

    ctx: int | None = model_option(
        None, "N", "Context in tokens: 8k. Default: the model's.", parser=parse_token_count
    )
    memory_fraction: float = advanced_option(
        0.9, "F", "Share of device memory to use, above 0 to 1. Default: 0.9."
    )
    lookup: Path | None = model_option(
        None, "DIR", "Lookup drafts from earlier sessions too, which DIR keeps."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SamplingOptions:
    """Sampling: set by flags, --set and /set, else by the model's generation_config.json."""

    temperature: float | None = main_option(
        None, "T", "0 is greedy. Default: the model's, else 0.7."
    )
    max_tokens: int | None = main_option(
        None, "N", "Stop after N tokens. Default: the context.", "-n"
    )
    seed: int | None = input_option(None, "N", "Repeats a reply. Default: random; -v shows it.")
    top_p: float | None = input_option(None, "P", "Default: the model's, else 1.")
    stop: list[str] | None = input_option(
        None, "TEXT", "Stop before TEXT; \\n is a newline. Repeatable."
    )
    set: list[str] | None = input_option(
        None, "NAME=VALUE", "top_k, min_p, min_tokens, ignore_eos, logit_bias or a penalty."
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
    """Options of `generate` and `chat`."""

    adaptive: bool | None = model_option(
        None, None, "Adapt K to what is accepted.", "--adaptive/--no-adaptive"
    )
    template_arg: list[str] | None = input_option(
        None, "K=V", "A variable for the chat template. Repeatable."
    )
    think: str = main_option(
        "auto",
        THINK_METAVAR,
        "Think or not; hide: unseen; N: at most N tokens.",
        parser=parse_think,
    )
    system: str | None = main_option(None, "TEXT|@FILE", "System message.", "-s")
    no_server: bool = output_option(False, None, "Do not use a running spd serve.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class GenerateOptions(ReplyOptions):
    """The options of `spd generate`."""

    prompt: str | None = argument("PROMPT", "The prompt. Stdin and files come before it.", None)
    file: list[str] | None = main_option(
        None, "FILE", "Text from a file, - is stdin. Repeatable.", "-f"
    )
    messages: str | None = input_option(None, "FILE", "A chat as JSON: a list of role and content.")
    raw: bool = input_option(False, None, "No chat template: continue the text.")
    prompt_ids: str | None = input_option(None, "1,2,3", "Token ids instead of text.")
    dry_run: bool = input_option(False, None, "Show the prompt and its tokens; load no weights.")
    jsonl: bool = input_option(
        False, None, "One prompt a line on stdin or in -f FILE, one JSON line out for each."
    )
    json: bool = main_option(False, None, "One JSON object: text, tokens, timings, acceptance.")
    stats: bool = main_option(
        False, None, "Speed and acceptance on stderr at the end; of --jsonl, the speed."
    )
    output: Path | None = output_option(None, "FILE", "Write there, not to stdout.", "-o")
    schema: str | None = output_option(
        None, "FILE|JSON", "The reply is JSON that follows this JSON schema."
    )
    grammar: str | None = output_option(
        None, "LARK|/REGEX/", "The reply follows a Lark grammar (or its file), or matches REGEX."
    )
    logprobs: int | None = output_option(
        None, "N", "With --json: log-probabilities, the N likeliest tokens."
    )
    trace: Path | None = output_option(
        None, "FILE", "One JSON line for each round, for spd explain."
    )
    resume: bool = output_option(
        False, None, "With --jsonl -o FILE: continue after the answers in FILE."
    )
    concurrency: int | None = advanced_option(
        None, "N", "Lines of --jsonl at a time. Default: 8.", min=1, max=1024
    )


def parse_sampling_settings(assignments: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """Return fields of SamplingOptions from `name=value` texts, converted to the fields' types.

    Several values of a list are joined; an empty value, `auto` or `default` gives the field's
    default. flag: the option, for errors. Raises UsageError.
    """
    annotations = {
        field.name: str(field.type)
        for field in dataclasses.fields(SamplingOptions)
        if field.name != "set"
    }
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(
                f"{flag} {assignment} is not NAME=VALUE", fix=[f"{flag} temperature=0.5"]
            )
        if name not in annotations:
            fix = [f"one of {', '.join(sorted(annotations))}"]
            raise UsageError(f"{flag} {name}: there is no such parameter", fix=fix)
        if value in ("", "auto", "default"):
            changes[name] = getattr(SamplingOptions, name)
            continue
        parsed = parse_value(f"{flag} {name}", annotations[name], value)
        changes[name] = (
            [*(changes.get(name) or ()), parsed] if "list" in annotations[name] else parsed
        )
    return changes

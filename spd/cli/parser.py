"""The command class for Typer, with help in panels and names of other tools; value parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand

from spd.errors import IncompatibleError, UsageError

MAIN_PANEL = "Most used"
INPUT_PANEL = "Prompt and sampling"
OUTPUT_PANEL = "Output"
ADVANCED_PANEL = "Advanced"
"""Panels of the help in order; OUTPUT_PANEL is that of options without a panel."""
ARGUMENTS_PANEL = "Arguments"

FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--system-prompt": "--system",
        "--n-predict": "--max-tokens",
        "--max-new-tokens": "--max-tokens",
        "--ctx-size": "--ctx",
        "--max-model-len": "--ctx",
        "--temp": "--temperature",
        "-md": "--draft-model",
        "--num-speculative-tokens": "--draft-max",
        "--json-schema": "--schema",
    }
)
"""Options of other tools, and the option of spd that means the same."""

SET_NAMES = (
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_id",
    "top_k",
)
"""Sampling parameters that other tools have as options and spd has under --set."""
PROMPT_FIX = 'spd generate "your prompt"'
OPTION_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "-p": PROMPT_FIX,
        "--prompt": PROMPT_FIX,
        "--mtp": "--draft-model HEAD",
        "--pull": "spd pull org/name",
        **{f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in SET_NAMES},
    }
)
"""Options that spd lacks, most of other tools, and what to type instead."""
COMMAND_FIXES: Mapping[str, str] = MappingProxyType(
    {
        "config": "write options into ~/.config/spd/config.toml: docs/guide.md",
        "download": "spd pull",
        "remove": "spd rm",
        "run": "spd chat",
        "show": "spd inspect",
    }
)
"""Commands of other tools, and what to type instead.

`help` is missing, as help is offered anyway.
"""
BEAM_OPTIONS = frozenset(
    {"--num-beams", "--beam", "--beams", "--beam-size", "--beam-width", "--beam-search"}
)


MIN_SIMILARITY = 0.75
"""The least similarity of two names, 0 to 1, at which one is suggested for the other."""


def refuse_foreign_option(name: str) -> None:
    """Raise the error for a well-known option that spd lacks: IncompatibleError or UsageError."""
    if name in BEAM_OPTIONS:
        raise IncompatibleError(
            f"{name}: spd has no beam search",
            reason=[
                "Speculation keeps the model's own sampling law; a beam search follows another one."
            ],
            fix=["leave it out; for the likeliest continuation token by token: --temperature 0"],
            code="beam_search",
        )
    if name == "--trust-remote-code":
        raise IncompatibleError(
            f"{name}: spd never runs code from a model folder",
            fix=["leave it out; `spd inspect MODEL` says whether the architecture is built in"],
            code="remote_code",
        )
    if name in OPTION_FIXES:
        raise UsageError(f"no such option: {name}", fix=[OPTION_FIXES[name]])


def similar_options(name: str, options: Sequence[str]) -> list[str]:
    """Return the options that `name` may mean: those that begin with it or are similar to it."""
    from difflib import SequenceMatcher

    bare_name = name.strip("-")  # all names begin with dashes
    return [
        option
        for option in options
        if option.strip("-").startswith(bare_name)
        or SequenceMatcher(None, bare_name, option.strip("-")).ratio() >= MIN_SIMILARITY
    ]


class Command(TyperCommand):
    """A command of spd."""

    def make_parser(self, ctx: Any) -> Any:
        """Add the names of other tools as aliases of the command's options."""
        parser = super().make_parser(ctx)
        long_options = parser._long_opt
        long_options |= {
            foreign: long_options[ours]
            for foreign, ours in FOREIGN_OPTIONS.items()
            if ours in long_options
        }
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; an option with an optional [VALUE] may stand alone.

        Raises what `refuse_foreign_option` raises.
        """
        optional_value_params = [
            p for p in self.params if p.param_type_name == "option" and (p.metavar or "")[:1] == "["
        ]
        optional_value_names = {name for param in optional_value_params for name in param.opts}
        expanded_args: list[str] = []
        for argument, next_argument in zip(args, [*args[1:], "-"], strict=False):
            expanded_args.append(argument)
            is_value = not next_argument.startswith("-") and "/" not in next_argument
            if argument in optional_value_names and not is_value:  # a model follows, or an option
                expanded_args.append("")
        try:
            return super().parse_args(ctx, expanded_args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                name = getattr(error, "option_name", "")
                refuse_foreign_option(name)
                options = getattr(error, "possibilities", ()) or ()
                vars(error)["possibilities"] = similar_options(name, options)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel."""
        panels: dict[str, list[tuple[str, str] | None]] = {
            ARGUMENTS_PANEL: [],
            MAIN_PANEL: [],
            INPUT_PANEL: [],
        }
        for param in self.get_params(ctx):
            default_panel = ARGUMENTS_PANEL if param.param_type_name == "argument" else OUTPUT_PANEL
            panel = getattr(param, "rich_help_panel", None) or default_panel
            panels.setdefault(panel, []).append(param.get_help_record(ctx))
        for panel in (OUTPUT_PANEL, ADVANCED_PANEL):
            panels[panel] = panels.pop(panel, [])
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


def normalize_spec(text: str) -> str:
    """Return methods joined by a plus with lookup last; they are not checked."""
    return "+".join(sorted((part.strip() for part in re.split("[,+]", text)), key="ngram".__eq__))


def parse_size(text: str) -> int:
    """Return a count such as 4096, 8k or 32K (k = 1024). Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,12})([kK]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096, 8k or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_value(name: str, annotation: str, text: str) -> Any:
    """Return text as a value of a field with this annotation.

    `auto` becomes None if the field allows it. name: the option for messages. Raises UsageError.
    """
    match = re.search(r"\b(bool|float|int)\b", annotation)
    if "None" in annotation and text == "auto":
        return None
    if match is None:
        return text
    if match[1] == "bool":
        switch_values = {"on": True, "off": False, "true": True, "false": False}
        if text not in switch_values:
            message = f"{text} is not on or off" if text else "on or off?"
            raise UsageError(f"{name}: {message}", fix=[f"{name} on|off"])
        return switch_values[text]
    try:
        return float(text) if match[1] == "float" else int(text)
    except ValueError:
        raise UsageError(f"{name}: {text} is not a number", fix=[f"{name} 1"]) from None

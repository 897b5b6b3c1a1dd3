"""Commands as Typer reads them, with other tools' names of options, and help in panels, most used first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand

from spd.errors import IncompatibleError, UsageError

FIRST = "Most used"
IN = "Prompt and sampling"
OTHER = "Output"
LAST = "Advanced"
"""Panels: the first one, that of all that goes in, that of what names none, the last one."""
ARGUMENTS = "Arguments"

FOREIGN: Mapping[str, str] = MappingProxyType(
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
"""What other tools call our options."""

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
FIXES: Mapping[str, str] = MappingProxyType(
    {
        "-p": PROMPT_FIX,
        "--prompt": PROMPT_FIX,
        **{f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in SET_NAMES},
    }
)
"""What to type for an option of other tools for which spd has another way."""
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "config": "write options into ~/.config/spd/config.toml: docs/guide.md",
        "download": "spd pull",
        "remove": "spd rm",
        "run": "spd chat",
        "show": "spd inspect",
    }
)
"""What to type for a command that other tools have; of `help`, the help is offered anyway."""
BEAM = frozenset(
    {"--num-beams", "--beam", "--beams", "--beam-size", "--beam-width", "--beam-search"}
)


NEAR = 0.75
"""Of the letters of two names, the share in common from which one may be meant by the other."""


def refuse_by_name(name: str) -> None:
    """Say why a command lacks an option that people look for. Raises IncompatibleError and UsageError."""
    if name in BEAM:
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
    if name in FIXES:
        raise UsageError(f"no such option: {name}", fix=[FIXES[name]])


def near(name: str, options: Sequence[str]) -> list[str]:
    """Return those of `options` that may be meant by `name`: the beginning of one, or a slip in it."""
    from difflib import SequenceMatcher

    word = name.strip("-")  # dashes are alike in all
    return [
        option
        for option in options
        if option.strip("-").startswith(word)
        or SequenceMatcher(None, word, option.strip("-")).ratio() >= NEAR
    ]


class Command(TyperCommand):
    """A command of spd."""

    def make_parser(self, ctx: Any) -> Any:
        """Let the names of other tools stand for ours, where the command has these."""
        parser = super().make_parser(ctx)
        known = parser._long_opt
        known |= {foreign: known[ours] for foreign, ours in FOREIGN.items() if ours in known}
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let an option with a [VALUE] stand alone. Raises what `refuse_by_name` raises."""
        valued = [
            p for p in self.params if p.param_type_name == "option" and (p.metavar or "")[:1] == "["
        ]
        alone = {name for param in valued for name in param.opts}
        words: list[str] = []
        for word, after in zip(args, [*args[1:], "-"], strict=False):
            words.append(word)
            if word in alone and (
                after.startswith("-") or "/" in after
            ):  # a model follows, or an option
                words.append("")
        try:
            return super().parse_args(ctx, words)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                name = getattr(error, "option_name", "")
                refuse_by_name(name)
                vars(error)["possibilities"] = near(name, getattr(error, "possibilities", ()) or ())
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel."""
        panels: dict[str, list[Any]] = {ARGUMENTS: [], FIRST: [], IN: []}
        for param in self.get_params(ctx):
            usual = ARGUMENTS if param.param_type_name == "argument" else OTHER
            panel = getattr(param, "rich_help_panel", None) or usual
            panels.setdefault(panel, []).append(param.get_help_record(ctx))
        for panel in (OTHER, LAST):
            panels[panel] = panels.pop(panel, [])
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


def in_order(text: str) -> str:
    """Two methods with lookup as the second, joined by a plus; whether there are such is not asked."""
    return "+".join(sorted((part.strip() for part in re.split("[,+]", text)), key="ngram".__eq__))


def parse_size(text: str) -> int:
    """A count such as 4096, 8k or 32K (k = 1024)."""
    match = re.fullmatch(r"([0-9]{1,12})([kK]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a number of tokens such as 4096, 8k or 32k")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_as(what: str, kind: str, text: str) -> Any:
    """Text as a field whose annotation is `kind`; `auto` is None where that may be. Raises UsageError."""
    match = re.search(r"\b(bool|float|int)\b", kind)
    if "None" in kind and text == "auto":
        return None
    if match is None:
        return text
    if match[1] == "bool":
        if text not in (known := {"on": True, "off": False, "true": True, "false": False}):
            words = f"{text} is not on or off" if text else "on or off?"
            raise UsageError(f"{what}: {words}", fix=[f"{what} on|off"])
        return known[text]
    try:
        return float(text) if match[1] == "float" else int(text)
    except ValueError:
        raise UsageError(f"{what}: {text} is not a number", fix=[f"{what} 1"]) from None

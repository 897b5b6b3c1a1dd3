"""Commands as Typer reads them, with other tools' names of options, and help in panels, most used first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer
from typer.core import TyperCommand

from spd.errors import IncompatibleError, UsageError

FIRST, IN, OTHER, LAST = "Most used", "Prompt and sampling", "Output", "Advanced"
"""Panels: the first one, that of all that goes in, that of what names none, the last one."""
ARGUMENTS = "Arguments"

BY_NAME = (
    *(
        "top_k",
        "min_p",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ),
    *("logit_bias", "stop_token_id"),
)
"""Parameters that --set takes."""
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

CUT: Mapping[str, str] = MappingProxyType(
    {
        "-p": 'spd generate "your prompt"',
        "--attach": "spd generate -m TARGET --spec mtp --mtp HEAD -v",
        "--bug-report": "spd doctor --json",
        "--config": "SPD_CONFIG=FILE spd …",
        "--csv": "--json | jq -r '.rows[] | [.method, .tokens_per_second.median] | @csv'",
        "--debug": "-vv",
        "--draft-ctx": "leave it out, or a smaller --ctx",
        "--dry-run": "leave it out: spd rm asks before it removes anything",
        "--each": "--prompts FILE",
        "--explain": "spd generate --trace FILE …, then spd explain FILE",
        "--fail-if-slower": "spd compare A.json B.json exits 6 if a row became slower",
        "--force": "name a new folder",
        "--goodput": "jq .samples of --json, which hold every time",
        "--hide-thinking": "--think hide",
        "--layout": "scripts/export_deepseek_nextn.py of SGLang, for its one-layer model",
        "--load": "spd bench --load dummy",
        "--ngram-max": "--spec ngram finds the longest match by itself",
        "--ngram-min": "--spec ngram finds the longest match by itself",
        "--no-color": "--color never",
        "--no-history": "XDG_STATE_HOME=FOLDER spd chat keeps its files elsewhere",
        "--no-input": "spd … < /dev/null",
        "--no-stream": "--json | jq -r .text",
        "--no-think": "--think off",
        "--offline": "HF_HUB_OFFLINE=1 spd …",
        "--parse-special": "--prompt-ids 1,2,3",
        "--plot": "--json | jq .rows, which hold every figure",
        "--profile": "spd generate --trace FILE …, then spd explain FILE",
        "--prompt": 'spd generate "your prompt"',
        "--regex": "--grammar /REGEX/",
        "--rendezvous": "torchrun says where ranks meet",
        "--repeat": "leave it out: spd uses the last module again by itself",
        "--revision": "spd pull NAME --revision REV prints a folder for -m",
        "--session": "-c NAME",
        "--stream": "leave it out: text comes as it is made",
        "--synthetic-acceptance": "spd bench --synthetic-acceptance LENGTH",
        "--system-file": "-s @FILE",
        "--think-budget": "--think N",
        "--time": "-r N",
        "--vi": "Ctrl-G opens $EDITOR",
        **{f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in BY_NAME},
    }
)
"""What to type now in the place of an option that some command had."""
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
    if name in CUT:
        raise UsageError(f"{name} is no longer an option", fix=[CUT[name]], code="cut_option")


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
                refuse_by_name(getattr(error, "option_name", ""))
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

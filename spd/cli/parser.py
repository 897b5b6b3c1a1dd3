"""Panels of options, names of other tools' options, and parsers of values; no Typer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spd.errors import IncompatibleError, UsageError

MAIN_PANEL = "Most used"
INPUT_PANEL = "Prompt and sampling"
OUTPUT_PANEL = "Output"
ADVANCED_PANEL = "Advanced"
"""Panels of the help in order; OUTPUT_PANEL is that of options without a panel."""
ARGUMENTS_PANEL = "Arguments"
"""The panel of the help with arguments."""

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
"""What to type instead of another tool's option for the prompt."""
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
"""Options of other tools for beam search, which spd does not do."""


MIN_SIMILARITY = 0.75
"""The least similarity of two names, 0 to 1, at which one is suggested for the other."""


def refuse_foreign_option(name: str) -> None:
    """Raise IncompatibleError or UsageError if `name` is a well-known option that spd lacks."""
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


def bad_value(message: str) -> Exception:
    """Return Typer's error for the value of an option, a BadParameter."""
    import typer  # slow to import, and only errors need it

    return typer.BadParameter(message)


def normalize_spec(text: str) -> str:
    """Return methods, typed with commas or plus signs, joined by a plus with lookup last.

    They are not checked.
    """
    return "+".join(sorted((part.strip() for part in re.split("[,+]", text)), key="ngram".__eq__))


def parse_token_count(text: str) -> int:
    """Return a number of tokens such as 4096, 8k or 32K (k = 1024). Raises BadParameter."""
    match = re.fullmatch(r"([0-9]{1,12})([kK]?)", text.strip())
    if match is None:
        raise bad_value(f"{text!r} is not a number of tokens such as 4096, 8k or 32k")
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
    joint = "=" if " " in name else " "  # `/set temperature` and `--set top_k` take NAME=VALUE
    if match[1] == "bool":
        switch_values = {"on": True, "off": False, "true": True, "false": False}
        if text not in switch_values:
            message = f"{text} is not on or off" if text else "on or off?"
            raise UsageError(f"{name}: {message}", fix=[f"{name}{joint}on|off"])
        return switch_values[text]
    try:
        return float(text) if match[1] == "float" else int(text)
    except ValueError:
        raise UsageError(f"{name}: {text} is not a number", fix=[f"{name}{joint}1"]) from None

"""The options of the commands that measure and judge: bench, compare, explain, verify."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spd.cli.help import FIRST, LAST
from spd.cli.options import (
    AdvancedOptions,
    CommonOptions,
    MachineOptions,
    MemoryOption,
    ModelOptions,
    SpeculationOptions,
    model_names,
)
from spd.errors import UsageError
from spd.runtime.plan.config import METHODS

if TYPE_CHECKING:
    from spd.runtime.lab.prompt_set import Prompt

EACH = 2
"""Prompts of each of spd's own categories."""
_first = functools.partial(typer.Option, rich_help_panel=FIRST)
_advanced = functools.partial(typer.Option, rich_help_panel=LAST)
_sweep = functools.partial(typer.Option, rich_help_panel="What is compared")
_work = functools.partial(typer.Option, rich_help_panel="What is asked")
_output = functools.partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SweepOptions:
    """The axes of a sweep; each takes a comma list."""

    spec: Annotated[
        str,
        _first(
            metavar="METHODS",
            help=f"{', '.join(METHODS)}; mtp+ngram. Plain is always measured.",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _first(autocompletion=model_names, metavar="MODEL", help="A smaller model, or an EAGLE-3 head."),
    ] = None
    mtp: Annotated[
        str | None, _sweep(autocompletion=model_names, metavar="HEAD", help="A folder with an MTP head.")
    ] = None
    draft_max: Annotated[
        str | None, _first(metavar="K,…", help="Draft tokens a round; a list of them is held fixed.")
    ] = None
    adaptive: Annotated[
        bool | None, _sweep("--adaptive/--no-adaptive", help="Fit K to what is accepted, or hold it.")
    ] = None
    verify: Annotated[str, _sweep(metavar="RULES", help="coupled, rejection, block.")] = "coupled"
    synthetic_acceptance: Annotated[
        float | None, _sweep(metavar="LENGTH", help="Impose this many tokens a round: speed only.")
    ] = None
    load: Annotated[
        Literal["auto", "dummy"],
        _sweep(metavar="HOW", help="dummy: random weights of the configured shapes, speed only."),
    ] = "auto"
    lag: Annotated[str, _advanced(metavar="N,…", help="Rounds the host may run behind: auto, 0, 1, 2.")] = (
        "auto"
    )
    graphs: Annotated[str, _advanced(metavar="MODES", help="CUDA graphs: auto, on, off.")] = "auto"
    tp: Annotated[str, _advanced(metavar="N,…", help="Tensor parallel ranks. Default: 1.")] = "1"
    draft_tp: Annotated[str, _advanced(metavar="N,…", help="Ranks that share the drafter, or auto.")] = "auto"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class WorkOptions:
    """What every engine is asked."""

    category: Annotated[
        str | None,
        _work(metavar="NAMES", help="code, edit, summarise, reasoning, creative. Default: all of them."),
    ] = None
    prompts: Annotated[
        Path | None, _work(metavar="FILE", help='Your own: lines of text, or {"prompt": …} in a .jsonl.')
    ] = None
    temperature: Annotated[str, _first(metavar="T,…", help="Sampling temperatures. Default: 0,0.8.")] = (
        "0,0.8"
    )
    prompt_tokens: Annotated[
        str | None, _work(metavar="N,…", help="Lengthen or cut prompts to N tokens, such as 1k.")
    ] = None
    max_tokens: Annotated[
        int, _first("-n", "--max-tokens", metavar="N", help="Tokens a reply at most. Default: 64.")
    ] = 64
    ignore_eos: Annotated[bool, _work("--ignore-eos", help="Do not stop at the end of the text.")] = False
    concurrency: Annotated[
        str, _first(metavar="N,…", help="Requests at a time; with --rate, slots at most. Default: 1.")
    ] = "1"
    rate: Annotated[
        str | None, _work(metavar="R,…", help="Requests a second as they come by chance (open loop).")
    ] = None
    repetitions: Annotated[
        int | None,
        _work("-r", "--repetitions", metavar="N", help="Default: as many as fit into 80 s, 3 to 20."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ResultOptions:
    """What comes back and what fails."""

    json: Annotated[bool, _first("--json", help="One JSON object with every sample.")] = False
    output: Annotated[
        Path | None, _output("-o", "--output", metavar="FILE", help="Write the JSON object there too.")
    ] = None
    fail_if_slower: Annotated[
        str | None, _output(metavar="3%", help="Exit 6 if a row is this much slower than plain decoding.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(
    MemoryOption,
    CommonOptions,
    ResultOptions,
    WorkOptions,
    SweepOptions,
    MachineOptions,
    ModelOptions,
):
    """Everything `spd bench` takes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(CommonOptions):
    """Everything `spd compare` takes."""

    files: Annotated[
        list[Path], typer.Argument(metavar="A.json B.json …", help="Results of spd bench, the oldest first.")
    ]
    threshold: Annotated[
        str, _first(metavar="3%", help="Slower by more than this, and more than noise, is a regression.")
    ] = "3%"
    json: Annotated[bool, _output("--json", help="One JSON object.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExplainOptions(CommonOptions):
    """Everything `spd explain` takes."""

    files: Annotated[
        list[Path], typer.Argument(metavar="TRACE …", help="Files of --trace, all of one model.")
    ]
    json: Annotated[bool, _output("--json", help="One JSON object.")] = False


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(AdvancedOptions, CommonOptions, SpeculationOptions, ModelOptions):
    """Everything `spd verify` takes."""

    adaptive: Annotated[
        bool, _sweep("--adaptive/--no-adaptive", help="Fit K to what is accepted; held fixed by default.")
    ] = False
    against: Annotated[
        str, _first(metavar="SETTING=…", help="The other side: spec=off, lag=0, kernels=torch, slots=1 …")
    ] = "spec=off"
    prompts: Annotated[Path | None, _work(metavar="FILE", help="Your own, as for spd bench.")] = None
    temperature: Annotated[str, _first(metavar="T,…", help="Sampling temperatures. Default: 0,0.8.")] = (
        "0,0.8"
    )
    max_tokens: Annotated[
        int, _first("-n", "--max-tokens", metavar="N", help="Tokens a reply at most. Default: 64.")
    ] = 64
    tokens: Annotated[int, _first(metavar="N", help="Ask with new seeds until replies could hold N.")] = 0
    concurrency: Annotated[int, _first(metavar="N", help="Requests at a time. Default: 1.")] = 1
    json: Annotated[bool, _first("--json", help="The certificate on standard output.")] = False
    ctx: int | None = None


def split(text: str, flag: str) -> list[str]:
    """The members of a comma list, each once. Raises UsageError for an empty member."""
    members = [member.strip() for member in text.split(",")]
    if not all(members):
        raise UsageError(f"{flag} {text!r} has an empty member", fix=[f"{flag} A,B"])
    return list(dict.fromkeys(members))


def numbers(text: str, flag: str, kind: Literal["int", "float"], low: float, high: float) -> list[float]:
    """A comma list of numbers within bounds. Raises UsageError naming the one that is not."""
    found = []
    for member in split(text, flag):
        try:
            value = float(int(member)) if kind == "int" else float(member)
        except ValueError:
            raise UsageError(f"{flag} {member} is not a number", fix=[f"{flag} 1,2"]) from None
        if not low <= value <= high:
            raise UsageError(f"{flag} {member} is out of range", reason=[f"valid: {low:g} to {high:g}"])
        found.append(value)
    return list(dict.fromkeys(found))


def parse_share(text: str, flag: str) -> float:
    """`3%` or `0.03` as 0.03. Raises UsageError."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{flag} {text} is not a share", fix=[f"{flag} 3%"])
    return value


def check_least(*given: tuple[str, float | None, int]) -> None:
    """Raise UsageError for the first (flag, value, least) whose value is less than that, or no number."""
    for flag, value, least in given:
        if value is not None and not least <= value < inf:
            raise UsageError(f"{flag} {value} is out of range", reason=[f"valid: {least} or more"])


def chosen_prompts(path: Path | None, category: str | None = None) -> tuple[Prompt, ...]:
    """The prompts asked for: of a file all, of spd's own a few of each category."""
    from spd.runtime.lab.prompt_set import OWN, choose, read_prompts

    categories = split(category, "--category") if category is not None else None
    return choose(read_prompts(path or OWN), categories, EACH if path is None else None)

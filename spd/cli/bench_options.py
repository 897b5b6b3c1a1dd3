"""The options of the commands that measure and judge: bench, compare, explain, verify."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spd.cli.options import (
    AdvancedOptions,
    CommonOptions,
    MachineOptions,
    ModelOptions,
    SpeculationOptions,
    model_names,
)
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.runtime.lab.prompt_set import Prompt

DEFAULT_EACH = 2
_sweep = functools.partial(typer.Option, rich_help_panel="What is compared")
_work = functools.partial(typer.Option, rich_help_panel="What is asked")
_measure = functools.partial(typer.Option, rich_help_panel="How it is measured")
_output = functools.partial(typer.Option, rich_help_panel="Output")
_judge = functools.partial(typer.Option, rich_help_panel="Verdict")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class SweepOptions:
    """The axes of a sweep; each takes a comma list."""

    spec: Annotated[
        str,
        _sweep(
            metavar="METHODS",
            help="off, auto, draft, eagle3, ngram, mtp; two in one: mtp+ngram. Plain is always measured.",
        ),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _sweep(autocompletion=model_names, metavar="MODEL", help="A smaller model, or an EAGLE-3 head."),
    ] = None
    mtp: Annotated[
        str | None, _sweep(autocompletion=model_names, metavar="HEAD", help="A folder with an MTP head.")
    ] = None
    draft_max: Annotated[
        str | None, _sweep(metavar="K,…", help="Draft tokens a round; a list of them is held fixed.")
    ] = None
    adaptive: Annotated[
        bool | None, _sweep("--adaptive/--no-adaptive", help="Fit K to what is accepted, or hold it.")
    ] = None
    verify: Annotated[str, _sweep(metavar="RULES", help="coupled, rejection, block.")] = "coupled"
    synthetic_acceptance: Annotated[
        float | None, _sweep(metavar="LENGTH", help="Impose this many tokens a round: speed only.")
    ] = None
    lag: Annotated[str, _sweep(metavar="N,…", help="Rounds the host may run behind: auto, 0, 1, 2.")] = "auto"
    graphs: Annotated[str, _sweep(metavar="MODES", help="CUDA graphs: auto, on, off.")] = "auto"
    tp: Annotated[str, _sweep(metavar="N,…", help="Tensor parallel ranks.")] = "1"
    draft_tp: Annotated[str, _sweep(metavar="N,…", help="Ranks that share the drafter, or auto.")] = "auto"
    rendezvous: Annotated[
        str | None, _sweep(metavar="ADDRESS", help="Where started ranks meet; torchrun says it.")
    ] = None


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
    each: Annotated[int | None, _work(metavar="N", help="Prompts of each category. Default: 2.")] = None
    temperature: Annotated[str, _work(metavar="T,…", help="Sampling temperatures.")] = "0,0.8"
    prompt_tokens: Annotated[
        str | None, _work(metavar="N,…", help="Lengthen or cut prompts to N tokens, such as 1k.")
    ] = None
    max_tokens: Annotated[int, _work("-n", "--max-tokens", metavar="N", help="Tokens a reply at most.")] = 64
    ignore_eos: Annotated[bool, _work("--ignore-eos", help="Do not stop at the end of the text.")] = False
    concurrency: Annotated[
        str, _work(metavar="N,…", help="Requests at a time (closed loop); with --rate, slots at most.")
    ] = "1"
    rate: Annotated[
        str | None, _work(metavar="R,…", help="Requests a second as they come by chance (open loop).")
    ] = None
    seed: Annotated[int, _work(metavar="N", help="Of sampling and of arrivals.")] = 0


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class MeasureOptions:
    """How long and how often."""

    repetitions: Annotated[
        int | None,
        _measure("-r", "--repetitions", metavar="N", help="Default: as many as fit into --time, 3 to 20."),
    ] = None
    time: Annotated[float, _measure(metavar="SECONDS", help="To measure for, loading not counted.")] = 80.0
    warmup: Annotated[int, _measure("-w", "--warmup", metavar="N", help="Unmeasured replies first.")] = 1
    goodput: Annotated[
        str | None, _measure(metavar="ttft:MS,tpot:MS", help="Count the requests that take no longer.")
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False, init=False)
class ResultOptions:
    """What comes back and what fails."""

    json: Annotated[bool, _output("--json", help="One JSON object with every sample.")] = False
    jsonl: Annotated[bool, _output("--jsonl", help="One JSON object a row.")] = False
    csv: Annotated[bool, _output("--csv", help="Comma-separated values.")] = False
    markdown: Annotated[bool, _output("--markdown", help="A table to paste.")] = False
    output: Annotated[
        Path | None, _output("-o", "--output", metavar="FILE", help="Write the JSON object there too.")
    ] = None
    plot: Annotated[
        Path | None, _output(metavar="FILE", help="Draw the rows: .svg, .png or .pdf (needs matplotlib).")
    ] = None
    profile: Annotated[
        Path | None, _output(metavar="DIR", help="Then profile one prompt each: Chrome traces, summaries.")
    ] = None
    baseline: Annotated[
        Path | None, _judge(metavar="FILE", help="An earlier JSON object to compare with.")
    ] = None
    fail_if_slower: Annotated[
        str | None,
        _judge(metavar="3%", help="Exit 6 if a row is this much slower than --baseline, else than plain."),
    ] = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BenchOptions(
    MachineOptions, CommonOptions, ResultOptions, MeasureOptions, WorkOptions, SweepOptions, ModelOptions
):
    """Everything `spd bench` takes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompareOptions(CommonOptions):
    """Everything `spd compare` takes."""

    files: Annotated[
        list[Path], typer.Argument(metavar="A.json B.json …", help="Results of spd bench, the oldest first.")
    ]
    threshold: Annotated[
        str, _judge(metavar="3%", help="Slower by more than this, and more than noise, is a regression.")
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
        str, _judge(metavar="SETTING=…", help="The other side: spec=off, lag=0, kernels=torch, slots=1 …")
    ] = "spec=off"
    category: Annotated[str | None, _work(metavar="NAMES", help="As for spd bench.")] = None
    prompts: Annotated[Path | None, _work(metavar="FILE", help="Your own, as for spd bench.")] = None
    each: Annotated[int | None, _work(metavar="N", help="Prompts of each category. Default: 2.")] = None
    temperature: Annotated[str, _work(metavar="T,…", help="Sampling temperatures.")] = "0,0.8"
    max_tokens: Annotated[int, _work("-n", "--max-tokens", metavar="N", help="Tokens a reply at most.")] = 64
    ignore_eos: Annotated[bool, _work("--ignore-eos", help="Do not stop at the end of the text.")] = False
    tokens: Annotated[int, _work(metavar="N", help="Ask with new seeds until replies could hold N.")] = 0
    concurrency: Annotated[int, _work(metavar="N", help="Requests at a time.")] = 1
    seed: Annotated[int, _work(metavar="N", help="Of sampling.")] = 0
    draws: Annotated[
        int | None,
        _judge(metavar="N", help="Replies a prompt and T to test a rule's law with. Default: 300 if needed."),
    ] = None
    redraft: Annotated[int, _judge(metavar="N", help="Rounds whose drafts are drawn again.")] = 64
    json: Annotated[bool, _output("--json", help="The certificate on standard output.")] = False
    output: Annotated[
        Path | None, _output("-o", "--output", metavar="FILE", help="Write the certificate there.")
    ] = None


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


def parse_goodput(text: str | None) -> dict[str, float]:
    """`ttft:500,tpot:50` as milliseconds by name. Raises UsageError."""
    found = {}
    for member in split(text, "--goodput") if text else ():
        name, _, value = member.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot") or not 0 < found[name] < inf:
            raise UsageError(f"--goodput {member} is not known", fix=["--goodput ttft:500,tpot:50"])
    return found


def check_least(*given: tuple[str, float | None, int]) -> None:
    """Raise UsageError for the first (flag, value, least) whose value is less than that, or no number."""
    for flag, value, least in given:
        if value is not None and not least <= value < inf:
            raise UsageError(f"{flag} {value} is out of range", reason=[f"valid: {least} or more"])


def chosen_prompts(options: BenchOptions | VerifyOptions) -> tuple[Prompt, ...]:
    """The prompts asked for: of --prompts all, of spd's own a few of each category, unless --each says."""
    from spd.runtime.lab.prompt_set import OWN, choose, read_prompts

    categories = split(options.category, "--category") if options.category is not None else None
    each = DEFAULT_EACH if options.each is None and options.prompts is None else options.each
    return choose(read_prompts(options.prompts or OWN), categories, each)

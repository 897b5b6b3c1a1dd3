"""Everything about a run but its prompts, checked, and prompts as token ids that fit. No torch here."""

from __future__ import annotations

import dataclasses
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.options import EngineOptions, GenerateOptions, ReplyOptions
from spd.cli.prompt_input import read_grammar
from spd.conversation.sampling import SamplingOptions, resolve_sampling
from spd.conversation.settings import Settings
from spd.conversation.thinking import thinking_budget
from spd.conversation.vocabulary import open_vocabulary
from spd.errors import UsageError
from spd.runtime.plan.config import EngineConfig

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`ID=VALUE` as a token id and a bias. Raises UsageError."""
    left, _, right = text.partition("=")
    try:
        return int(left), float(right)
    except ValueError:
        raise UsageError(
            f"logit_bias {text} is not ID=VALUE", fix=["--set logit_bias=42=-5"]
        ) from None


def unescape(text: str) -> str:
    r"""Text with \n, \t, \r, \0 and \\ read as in Python; other backslashes stay."""
    return re.sub(r"\\([ntr0\\])", lambda match: ESCAPES[match[1]], text)


def sampling_wishes(options: ReplyOptions) -> SamplingOptions:
    """Return what the options ask of sampling. Raises UsageError for a bias that is none."""
    names = {field.name for field in dataclasses.fields(SamplingOptions)}
    same = {name: getattr(options, name) for name in names if hasattr(options, name)}
    parsed = {
        "stop": tuple(unescape(text) for text in options.stop or ()),
        "stop_token_ids": tuple(options.stop_token_id or ()),
        "logit_bias": tuple(parse_logit_bias(text) for text in options.logit_bias or ()),
    }
    return SamplingOptions(**{**same, **parsed})


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "quantize",
    "spec",
    "draft_max",
    "adaptive",
    "verify",
    "kernels",
    "ctx",
    "memory_fraction",
    "threads",
    "tp",
    "draft_tp",
    "rendezvous",
)
"""Options that are the engine's own, by the same names."""


def plan_settings(options: ReplyOptions, folder: ModelFolder | None = None) -> Settings:
    """Read the small files of the model, and check everything that concerns no prompt."""
    from spd.formats.folder import ModelFolder

    folder = folder or ModelFolder.resolve(options.model)
    config = engine_config(options, folder)
    vocabulary = open_vocabulary(options.model, folder)
    grammar = None
    model = vocabulary.config
    usable = vocabulary.config.vocab_size
    if vocabulary.tokenizer is not None:
        usable = min(usable, vocabulary.tokenizer.vocab_size)
    if isinstance(options, GenerateOptions):
        grammar = read_grammar(options)
        if options.jsonl:
            config = dataclasses.replace(config, slots=options.concurrency or 8)
    sampling = resolve_sampling(sampling_wishes(options), folder.generation, usable)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    if grammar is not None:
        tokenizer = vocabulary.need_tokenizer()
        from spd.runtime import GrammarCompiler

        GrammarCompiler(tokenizer, model.vocab_size).compile(grammar, ())
    thinking_budget(options.think, vocabulary, False)
    return Settings(config, sampling, vocabulary, usable, context, grammar, options.think)


def engine_config(options: EngineOptions, folder: Path | ModelFolder) -> EngineConfig:
    """Return the options as an engine's configuration. Raises what EngineConfig refuses."""
    heads: dict[str, Any] = {name: getattr(options, name) for name in ("draft_model", "mtp")}
    if heads := {name: given for name, given in heads.items() if given is not None}:
        from spd.formats.folder import ModelFolder

        heads = {name: ModelFolder.resolve(given) for name, given in heads.items()}
    return EngineConfig(
        model=folder,
        **heads,
        lag=None if options.lag == "auto" else int(options.lag),
        graphs=None if options.graphs == "auto" else options.graphs == "on",
        **{name: getattr(options, name) for name in ENGINE_OPTIONS if hasattr(options, name)},
    )


CONFLICTS = (
    ("raw", ["system", "messages", "template_arg", "think"], "--raw uses no chat template"),
    ("prompt_ids", ["prompt", "file", "messages"], "--prompt-ids is the whole prompt"),
    ("prompt_ids", ["system", "template_arg", "think"], "--prompt-ids is the whole prompt"),
    ("messages", ["system"], "--messages is the whole chat, with its system message"),
    ("schema", ["grammar"], "each says what the whole reply looks like"),
    ("dry_run", ["stats", "trace"], "--dry-run runs no model"),
    ("jsonl", ["prompt", "prompt_ids"], "--jsonl reads its prompts from lines"),
    ("jsonl", ["json", "dry_run", "trace"], "--jsonl prints an object for each of many prompts"),
)
"""An option, others, and why it does not go with any of them."""
NEEDS = (
    ("logprobs", ["json", "jsonl"], "--logprobs are printed in JSON only", "--json --logprobs N"),
    ("concurrency", ["jsonl"], "--concurrency is for many prompts", "--jsonl --concurrency N"),
    (
        "resume",
        ["jsonl"],
        "--resume goes on in the file of an earlier run",
        "--jsonl -o FILE --resume",
    ),
    (
        "resume",
        ["output"],
        "--resume goes on in the file of an earlier run",
        "--jsonl -o FILE --resume",
    ),
)
"""An option, others of which it needs one, why, and what to type."""


def check_conflicts(options: GenerateOptions) -> None:
    """Raise UsageError for the first combination that is refused."""
    for name, others, why in CONFLICTS:
        for other in others:
            if _is_given(options, name) and _is_given(options, other):
                raise _refusal(f"{_shown(name)} and {_shown(other)}: {why}")
    for name, others, why, fix in NEEDS:
        if _is_given(options, name) and not any(_is_given(options, other) for other in others):
            raise _refusal(why, fix)
    check_shared(options)
    if (
        options.messages is not None
        and not options.jsonl
        and (options.prompt is not None or options.file)
    ):
        fix = "put the prompt into the file as its last user message"
        raise _refusal("--messages is the whole chat; it cannot be joined with a prompt", fix)
    if options.jsonl and len(options.file or ()) > 1:
        fix = "cat FILE FILE | spd generate --jsonl"
        raise _refusal("--jsonl reads one file of lines, and several are named", fix)
    grammars = [(options.schema or "").removeprefix("@"), options.grammar]
    files = options.file or ["-"] * options.jsonl
    read = [*files, "-" if options.system == "@-" else "", options.messages, *grammars]
    if read.count("-") > 1:
        fix = "leave one - out; with --jsonl, -f FILE for the lines"
        raise _refusal("stdin (-) is named twice and can be read once", fix)
    if options.jsonl and options.output is not None and options.output.is_file():
        with suppress(OSError, ValueError):
            if os.path.samefile(0 if files[0] == "-" else files[0], options.output):
                words = "-o names the file of the lines, and its answers would take their place"
                raise _refusal(words, "another -o FILE")


def check_shared(options: ReplyOptions) -> None:
    """What all commands that generate refuse."""
    if options.adaptive and options.draft_max == 0:
        raise _refusal("--adaptive fits the number of drafts, and --draft-max 0 asks for none")
    thinking = any(words.startswith("enable_thinking=") for words in options.template_arg or ())
    if thinking and _is_given(options, "think"):
        raise _refusal("--think and --template-arg enable_thinking say the same thing twice")


def _is_given(options: Any, name: str) -> bool:
    """Whether it differs from its default: typed, in a file, or by --set."""
    value = getattr(options, name)
    return bool(value != getattr(type(options), name) and value != [])


def _shown(name: str) -> str:
    return "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"


def _refusal(words: str, fix: str = "leave one of them out") -> UsageError:
    return UsageError(words, fix=[fix], code="conflict")

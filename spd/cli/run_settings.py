"""Checked settings of a run, without its prompts: engine, sampling, vocabulary and grammar.

No torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.options import EngineOptions, GenerateOptions, ReplyOptions
from spd.cli.prompt_input import read_grammar
from spd.conversation.sampling import SamplingOptions, resolve_sampling
from spd.errors import SpdError, UsageError
from spd.runtime.plan.config import POOL_TOKENS, EngineConfig

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.formats.folder import ModelFolder

ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
"""Characters by the letter behind a backslash that stands for them."""


def parse_logit_bias(text: str) -> tuple[int, float]:
    """Return a token id and a bias from `ID=VALUE`. Raises UsageError."""
    left, _, right = text.partition("=")
    try:
        return int(left), float(right)
    except ValueError:
        raise UsageError(
            f"logit_bias {text} is not ID=VALUE", fix=["--set logit_bias=42=-5"]
        ) from None


def unescape(text: str) -> str:
    r"""Return text with \n, \t, \r, \0 and \\ replaced as in Python; other backslashes stay."""
    return re.sub(r"\\([ntr0\\])", lambda match: ESCAPED_CHARACTERS[match[1]], text)


def requested_sampling(options: ReplyOptions) -> SamplingOptions:
    """Return the sampling parameters of the options. Raises UsageError for an invalid bias."""
    names = {field.name for field in dataclasses.fields(SamplingOptions)}
    same_fields = {name: getattr(options, name) for name in names if hasattr(options, name)}
    parsed_fields = {
        "stop": tuple(unescape(text) for text in options.stop or ()),
        "stop_token_ids": tuple(options.stop_token_id or ()),
        "logit_bias": tuple(parse_logit_bias(text) for text in options.logit_bias or ()),
    }
    return SamplingOptions(**{**same_fields, **parsed_fields})


ENGINE_OPTIONS = (
    "device",
    "dtype",
    "quantize",
    "activations",
    "kv",
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
    "lookup",
)
"""Options that are fields of EngineConfig under the same names."""


def plan_settings(options: ReplyOptions, folder: ModelFolder | None = None) -> Settings:
    """Read the model's small files, check all that needs no prompt, and return a run's settings.

    Starts the process that renders the chat template. Raises what reading and checking raise.
    """
    from spd.conversation.settings import Settings
    from spd.conversation.thinking import thinking_budget
    from spd.conversation.vocabulary import open_vocabulary
    from spd.formats.folder import ModelFolder

    folder = folder or ModelFolder.resolve(options.model)
    if not getattr(options, "raw", False):
        _start_template(folder)
    config = engine_config(options, folder)
    vocabulary = open_vocabulary(options.model, folder)
    grammar = None
    model = vocabulary.config
    usable_vocab_size = vocabulary.config.vocab_size
    if vocabulary.tokenizer is not None:
        usable_vocab_size = min(usable_vocab_size, vocabulary.tokenizer.vocab_size)
    if isinstance(options, GenerateOptions):
        grammar = read_grammar(options)
        if options.jsonl:
            config = dataclasses.replace(config, slots=options.concurrency or 8)
    if not isinstance(options, GenerateOptions) or options.jsonl:  # it answers more than once
        config = dataclasses.replace(config, pool_tokens=POOL_TOKENS)
    sampling = resolve_sampling(requested_sampling(options), folder.generation, usable_vocab_size)
    context = model.max_positions if options.ctx is None else min(options.ctx, model.max_positions)
    if grammar is not None:
        tokenizer = vocabulary.need_tokenizer()
        from spd.runtime import GrammarCompiler

        GrammarCompiler(tokenizer, model.vocab_size).compile(grammar, ())
    thinking_budget(options.think, vocabulary, False)
    return Settings(
        config, sampling, vocabulary, usable_vocab_size, context, grammar, options.think
    )


def _start_template(folder: ModelFolder) -> None:
    """Start the process that renders the chat template: it starts while the tokenizer is read."""
    with suppress(SpdError):  # a faulty file is refused where it is needed
        if folder.template is not None:
            folder.template.start_process()


def engine_config(options: EngineOptions, folder: Path | ModelFolder) -> EngineConfig:
    """Return the engine configuration of the options; the draft model's folder is found for it.

    Raises what this and EngineConfig raise.
    """
    draft_model = None
    if options.draft_model is not None:
        from spd.formats.folder import ModelFolder

        draft_model = ModelFolder.resolve(options.draft_model)
    values = {name: getattr(options, name) for name in ENGINE_OPTIONS if hasattr(options, name)}
    if values.get("lookup") is not None and options.spec == "auto":
        values["spec"] = "auto+ngram"
    return EngineConfig(
        model=folder,
        draft_model=draft_model,
        lag=None if options.lag == "auto" else int(options.lag),
        graphs=None if options.graphs == "auto" else options.graphs == "on",
        **values,
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
"""An option, other options that it excludes, and the reason."""
REQUIREMENTS = (
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
"""An option, other options of which it needs one, the reason, and the fix."""


def check_conflicts(options: GenerateOptions) -> None:
    """Raise UsageError for the first combination of options that is refused."""
    for name, other_names, reason in CONFLICTS:
        for other_name in other_names:
            if _is_option_set(options, name) and _is_option_set(options, other_name):
                raise _conflict_error(
                    f"{_typed_name(name)} and {_typed_name(other_name)}: {reason}"
                )
    for name, other_names, reason, fix in REQUIREMENTS:
        if _is_option_set(options, name) and not any(
            _is_option_set(options, other_name) for other_name in other_names
        ):
            raise _conflict_error(reason, fix)
    check_reply_options(options)
    if (
        options.messages is not None
        and not options.jsonl
        and (options.prompt is not None or options.file)
    ):
        fix = "put the prompt into the file as its last user message"
        raise _conflict_error(
            "--messages is the whole chat; it cannot be joined with a prompt", fix
        )
    if options.jsonl and len(options.file or ()) > 1:
        fix = "cat FILE FILE | spd generate --jsonl"
        raise _conflict_error("--jsonl reads one file of lines, and several are named", fix)
    grammars = [(options.schema or "").removeprefix("@"), options.grammar]
    files = options.file or ["-"] * options.jsonl
    stdin_candidates = [*files, "-" if options.system == "@-" else "", options.messages, *grammars]
    if stdin_candidates.count("-") > 1:
        fix = "leave one - out; with --jsonl, -f FILE for the lines"
        raise _conflict_error("stdin (-) is named twice and can be read once", fix)
    if options.jsonl and options.output is not None and options.output.is_file():
        with suppress(OSError, ValueError):
            if os.path.samefile(0 if files[0] == "-" else files[0], options.output):
                message = "-o names the file of the lines, and its answers would take their place"
                raise _conflict_error(message, "another -o FILE")


def check_reply_options(options: ReplyOptions) -> None:
    """Raise UsageError for combinations that all generating commands refuse."""
    if options.adaptive and options.draft_max == 0:
        raise _conflict_error(
            "--adaptive fits the number of drafts, and --draft-max 0 asks for none"
        )
    sets_thinking = any(
        assignment.startswith("enable_thinking=") for assignment in options.template_arg or ()
    )
    if sets_thinking and _is_option_set(options, "think"):
        raise _conflict_error("--think and --template-arg enable_thinking say the same thing twice")


def _is_option_set(options: ReplyOptions, name: str) -> bool:
    """True if an option differs from its default: typed, in a file, or by --set."""
    value = getattr(options, name)
    return bool(value != getattr(type(options), name) and value != [])


def _typed_name(name: str) -> str:
    """Return a field's name as it is typed."""
    return "PROMPT" if name == "prompt" else f"--{name.replace('_', '-')}"


def _conflict_error(message: str, fix: str = "leave one of them out") -> UsageError:
    """Return the error for options that exclude each other."""
    return UsageError(message, fix=[fix], code="conflict")

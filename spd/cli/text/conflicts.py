"""Options that cannot be honoured together, and those that need another one: two tables.

Only what the command line alone knows; what the engine cannot do together stands in
`spd.runtime.plan.config: CLASHES`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from spd.cli.options import GenerateOptions, ReplyOptions
from spd.errors import UsageError

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
    ("resume", ["jsonl"], "--resume goes on in the file of an earlier run", "--jsonl -o FILE --resume"),
    ("resume", ["output"], "--resume goes on in the file of an earlier run", "--jsonl -o FILE --resume"),
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
    if options.messages is not None and not options.jsonl and (options.prompt is not None or options.file):
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

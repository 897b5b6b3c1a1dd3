"""Options that cannot be honoured together, in one table, each with its own message.

Only what the command line alone knows (prompts and outputs, and speculation flags that would be
dropped in silence); what the engine cannot do together stands in `spd.runtime.plan.config: CLASHES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from spd.cli.options import CommonOptions, GenerateOptions
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.cli.commands.chat import ChatOptions

Options = TypeVar("Options", bound=CommonOptions)


@dataclass(frozen=True)
class Conflict(Generic[Options]):
    """One combination that is refused."""

    name: str
    when: Callable[[Options], bool]
    message: str
    fix: str


def _has_text(o: GenerateOptions) -> bool:
    return o.prompt is not None or bool(o.file)


def _inputs(o: GenerateOptions) -> list[str | None]:
    """Every file that is read; - is stdin, from which lines come unless -f says otherwise."""
    return [
        *(o.file or ["-"] * o.jsonl),
        "-" if o.system == "@-" else None,
        o.messages,
        (o.schema or "").removeprefix("@"),
        o.grammar,
    ]


def _answers_over_lines(o: GenerateOptions) -> bool:
    """Whether the file of answers is that of the lines, by whatever path."""
    if not o.jsonl or o.output is None or not o.output.is_file():
        return False
    lines = (o.file or ["-"])[0]
    with suppress(OSError, ValueError):
        return os.path.samefile(0 if lines == "-" else lines, o.output)
    return False


SHARED_CONFLICTS: tuple[Conflict[Any], ...] = (
    Conflict(
        "adaptive-no-drafts",
        lambda o: bool(o.adaptive) and o.draft_max == 0,
        "--adaptive fits the number of drafts, and --draft-max 0 asks for none",
        "leave one of them out",
    ),
    Conflict(
        "quiet-verbose",
        lambda o: o.quiet and o.verbose > 0,
        "--quiet and --verbose contradict each other",
        "leave one of them out",
    ),
    Conflict(
        "think-twice",
        lambda o: o.think != "auto" and any(v.startswith("enable_thinking=") for v in o.template_arg or ()),
        "--think and --template-arg enable_thinking say the same thing twice",
        "leave one of them out",
    ),
)
"""Of every command that generates."""

CHAT_CONFLICTS: tuple[Conflict[ChatOptions], ...] = (
    Conflict(
        "two-models",
        lambda o: {"model_argument", "model"} <= o.typed and o.model_argument != o.model,
        "the model is given twice: as an argument and with --model",
        "use one of them",
    ),
    Conflict(
        "drafts-markdown",
        lambda o: o.show_drafts and o.markdown == "on",
        "--show-drafts shows the text as it was drawn, so Markdown cannot be shown too",
        "leave one of them out",
    ),
)

CONFLICTS: tuple[Conflict[GenerateOptions], ...] = (
    *SHARED_CONFLICTS,
    Conflict(
        "raw-system",
        lambda o: o.raw and o.system is not None,
        "--raw uses no chat template, so there is no place for a system message",
        "leave --raw out, or write the system message into the text",
    ),
    Conflict(
        "raw-messages",
        lambda o: o.raw and o.messages is not None,
        "--raw uses no chat template, which --messages needs",
        "leave --raw out, or give the text with -f",
    ),
    Conflict(
        "raw-template-arg",
        lambda o: o.raw and (bool(o.template_arg) or o.think != "auto"),
        "--raw uses no chat template, so --template-arg and --think would do nothing",
        "leave one of them out",
    ),
    Conflict(
        "jsonl-ids",
        lambda o: o.jsonl and o.prompt_ids is not None,
        "--jsonl reads its prompts from lines, so there is no place for --prompt-ids",
        """a line {"prompt_ids": [1, 2, 3]}""",
    ),
    Conflict(
        "ids-text",
        lambda o: o.prompt_ids is not None and _has_text(o),
        "--prompt-ids is the whole prompt; it cannot be joined with text",
        "leave out --prompt-ids, or the PROMPT and --file",
    ),
    Conflict(
        "ids-messages",
        lambda o: o.prompt_ids is not None and o.messages is not None,
        "--prompt-ids is the whole prompt; it cannot be joined with --messages",
        "leave one of them out",
    ),
    Conflict(
        "ids-system",
        lambda o: o.prompt_ids is not None and o.system is not None,
        "--prompt-ids is the whole prompt; it cannot be joined with a system message",
        "leave one of them out",
    ),
    Conflict(
        "ids-template-arg",
        lambda o: o.prompt_ids is not None and (bool(o.template_arg) or o.think != "auto"),
        "--prompt-ids uses no chat template, so --template-arg and --think would do nothing",
        "leave one of them out",
    ),
    Conflict(
        "messages-text",
        lambda o: o.messages is not None and _has_text(o) and not o.jsonl,
        "--messages is the whole chat; it cannot be joined with a prompt",
        "put the prompt into the file as its last user message",
    ),
    Conflict(
        "messages-system",
        lambda o: o.messages is not None and o.system is not None,
        "--messages is the whole chat; it cannot be joined with --system",
        'put {"role": "system", "content": ...} first in the file',
    ),
    Conflict(
        "logprobs-json",
        lambda o: o.logprobs is not None and not (o.json or o.jsonl),
        "--logprobs are printed with --json and --jsonl only",
        "--json --logprobs N",
    ),
    Conflict(
        "dry-run-measures",
        lambda o: o.dry_run and (o.stats or o.trace is not None),
        "--dry-run runs no model, so there is nothing for --stats or --trace",
        "leave one of them out",
    ),
    Conflict(
        "grammars",
        lambda o: o.schema is not None and o.grammar is not None,
        "--schema and --grammar each say what the whole reply looks like",
        "use one of them",
    ),
    Conflict(
        "jsonl-prompt",
        lambda o: o.jsonl and o.prompt is not None,
        "--jsonl reads its prompts from lines, so there is no place for another one",
        "leave one of them out; what all lines begin with is --system or --messages",
    ),
    Conflict(
        "jsonl-files",
        lambda o: o.jsonl and len(o.file or ()) > 1,
        "--jsonl reads one file of lines, and several are named",
        "cat FILE FILE | spd generate --jsonl",
    ),
    Conflict(
        "two-stdins",
        lambda o: _inputs(o).count("-") > 1,
        "stdin (-) is named twice and can be read once",
        "leave one - out; with --jsonl, -f FILE for the lines",
    ),
    Conflict(
        "jsonl-output",
        _answers_over_lines,
        "-o names the file of the lines, and its answers would take their place",
        "another -o FILE",
    ),
    Conflict(
        "jsonl-json",
        lambda o: o.jsonl and o.json,
        "--jsonl prints one object a line, and --json one object",
        "leave one of them out",
    ),
    Conflict(
        "jsonl-dry-run",
        lambda o: o.jsonl and o.dry_run,
        "--dry-run shows one prompt, and --jsonl has many",
        "leave one of them out",
    ),
    Conflict(
        "jsonl-trace",
        lambda o: o.jsonl and o.trace is not None,
        "--trace follows one prompt, and --jsonl has many",
        "leave one of them out",
    ),
    Conflict(
        "concurrency-jsonl",
        lambda o: o.concurrency is not None and not o.jsonl,
        "--concurrency is for --jsonl: there is one prompt",
        "--jsonl --concurrency N",
    ),
    Conflict(
        "resume-jsonl",
        lambda o: o.resume and not (o.jsonl and o.output is not None),
        "--resume goes on in the file of an earlier --jsonl run",
        "--jsonl -o FILE --resume",
    ),
)


def check_conflicts(options: GenerateOptions) -> None:
    """Raise UsageError for the first combination in the table that applies."""
    _refuse_first(CONFLICTS, options)


def check_chat_conflicts(options: ChatOptions) -> None:
    """As `check_conflicts`, for a chat."""
    _refuse_first((*SHARED_CONFLICTS, *CHAT_CONFLICTS), options)


def _refuse_first(table: Sequence[Conflict[Options]], options: Options) -> None:
    for conflict in table:
        if conflict.when(options):
            raise UsageError(
                conflict.message, fix=[conflict.fix], code=f"conflict_{conflict.name.replace('-', '_')}"
            )

"""What is asked, from arguments, files, stdin and chats: UTF-8 text passed on as it is, not yet tokens."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions, ReplyOptions
from spd.cli.terminal.streams import is_terminal
from spd.conversation.messages import EXAMPLE_CHAT, check_messages, check_text
from spd.conversation.prompt import RESERVED_ARGS, Prompt
from spd.errors import IncompatibleError, UsageError
from spd.formats.files import read_input_text
from spd.runtime.engine.request import GrammarSpec

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer

CUT_SHARE = 0.75
"""Of the context, for the end of a long text: the other words of the prompt and the reply take the rest."""


def gather(options: GenerateOptions) -> Prompt:
    """Read everything the options name. Raises UsageError and NotFoundError."""
    if options.prompt_ids is not None:
        return Prompt(ids=_parse_ids(options.prompt_ids))
    shared = gather_shared(options)
    if options.messages is not None:
        return shared
    text = _gather_text(options)
    if options.raw:
        return Prompt(text=text)
    return replace(shared, messages=(*shared.messages, {"role": "user", "content": text}))


def gather_shared(options: GenerateOptions) -> Prompt:
    """What stands before a prompt: a whole chat or the system message, and the template's variables."""
    variables = template_variables(options)
    messages = () if options.messages is None else read_messages(options.messages)
    if (system := system_text(options.system)) is not None:
        messages = ({"role": "system", "content": system},)
    return Prompt(messages=messages, variables=variables)


def _gather_text(options: GenerateOptions) -> str:
    """Stdin, files, the argument, with blank lines between; only what --raw continues keeps its newline."""
    files = options.file or []
    stdin = sys.stdin
    parts = [read_text(name) for name in files]
    is_piped = stdin is not None and not stdin.closed and not is_terminal(stdin)
    if is_piped and "-" not in files and options.system != "@-" and (piped := read_text("-")):
        parts.insert(0, piped)
    if options.prompt is not None:
        parts.append(check_text(options.prompt, "the prompt"))
    if not parts:
        why = "stdin is a terminal" if is_terminal(sys.stdin) else "stdin is empty"
        why = f"No PROMPT argument and {why}."
        fix = ['spd generate "your prompt"', 'echo "your prompt" | spd generate']
        raise UsageError("nothing to generate from", reason=[why], fix=fix, code="no_prompt")
    files_end = len(parts) - (options.prompt is not None or options.raw)
    cut = [part.removesuffix("\n").removesuffix("\r") for part in parts[:files_end]]
    return "\n\n".join([*cut, *parts[files_end:]])


@contextmanager
def cut_named(
    options: GenerateOptions, asked: Prompt, context: int, tokenizer: Callable[[], Tokenizer | None]
) -> Iterator[None]:
    """Put a command that cuts the text first where it is refused as longer than the context."""
    try:
        yield
    except IncompatibleError as error:
        if error.code == "context_overflow" and (model := tokenizer()) is not None:
            error.fix = (*_cut_commands(options, asked, context, model), *error.fix)
        raise


def _cut_commands(
    options: GenerateOptions, asked: Prompt, context: int, tokenizer: Tokenizer
) -> list[str]:
    """Return the command that passes on the end of a long file or of stdin; nothing for other prompts."""
    files = [name for name in options.file or () if name != "-"]
    if options.messages is not None or asked.ids is not None or len(files) > 1:
        return []
    text = asked.messages[-1]["content"] if asked.text is None else asked.text
    typed = len(options.prompt or "")
    if len(text) <= 2 * typed:
        return []
    end = text[: len(text) - typed][-2 * context :]
    size = int(CUT_SHARE * context * len(end.encode()) / max(1, len(tokenizer.encode(end))))
    size -= size % 10 ** max(0, len(str(size)) - 2)
    cut = f"tail -c {size} {shlex.quote(files[0])}" if files else f"… | tail -c {size}"
    return [f"{cut} | spd generate …"]


def read_text(name: str) -> str:
    """A file's or stdin's text (-), at most 64 MiB of UTF-8; a byte order mark is dropped."""
    if not name:
        raise UsageError("the name of a file is empty", fix=["name a file, or - for stdin"])
    if name != "-" and os.path.isdir(name):
        raise UsageError(
            f"{name} is a folder, not a text file", fix=[f"-f {name.rstrip('/')}/FILE"]
        )
    return read_input_text(name, "check the path; - reads stdin")


def system_text(given: str | None) -> str | None:
    """What -s gives: a text, or with @ the text of a file. Raises UsageError and NotFoundError."""
    if given is None:
        return None
    return check_text(
        read_text(given[1:]) if given.startswith("@") else given, "the system message"
    )


def _parse_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or blanks. Raises UsageError."""
    with suppress(ValueError):
        if ids := tuple(int(word) for word in text.replace(",", " ").split()):
            return ids
    raise UsageError(
        f"--prompt-ids {text[:60]} is not a list of token ids", fix=["--prompt-ids 1,2,3"]
    )


def template_variables(options: ReplyOptions) -> dict[str, Any]:
    """What the options tell the chat template: JSON values (true, 3), else texts. Raises UsageError."""
    variables: dict[str, Any] = {}
    for word in options.template_arg or ():
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or name in RESERVED_ARGS:
            words = f"--template-arg {word} is not NAME=VALUE"
            raise UsageError(words, fix=["--template-arg enable_thinking=false"])
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = check_text(value, "--template-arg")
    return (
        variables
        if options.think == "auto"
        else variables | {"enable_thinking": options.think != "off"}
    )


def read_json(name: str, example: str) -> Any:
    """The JSON of a file, or of stdin. Raises UsageError with an example."""
    try:
        return json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        shown = "stdin" if name == "-" else name
        raise UsageError(f"{shown} is not JSON: {error}", fix=[example]) from None


def read_messages(name: str) -> tuple[Mapping[str, Any], ...]:
    """A chat from a JSON file: a list of messages, or an object with `messages`. Raises UsageError."""
    loaded = read_json(name, EXAMPLE_CHAT)
    shown = "stdin" if name == "-" else name
    return check_messages(loaded.get("messages") if isinstance(loaded, dict) else loaded, shown)


def read_grammar(options: GenerateOptions) -> GrammarSpec | None:
    """The schema, expression or grammar of the flags. Raises UsageError and NotFoundError."""
    if (schema := options.schema) is not None:
        is_file = schema.lstrip()[:1] not in ("{", "") and schema.strip() not in ("true", "false")
        text = read_text(schema.removeprefix("@")) if is_file else schema
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = ["""--schema '{"type": "object"}'""", "--schema FILE"]
            raise UsageError(f"--schema is not JSON: {error}", fix=fix) from None
        return GrammarSpec("schema", text)
    if (grammar := options.grammar) is not None:
        if len(grammar) > 1 and grammar[0] == grammar[-1] == "/":  # a file's name does not end so
            return GrammarSpec("regex", grammar[1:-1])
        inline = re.search(r"^\s*[?!]*start\b[^\n]*:", grammar, re.MULTILINE) is not None
        return GrammarSpec("lark", grammar if inline else read_text(grammar))
    return None

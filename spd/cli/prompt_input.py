"""The prompt of a command from arguments, files, stdin and chats: UTF-8 text, not yet tokens."""

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
"""The share of the context for the end of a long text.

The remaining prompt and the reply get the rest.
"""
LEAST_TOKEN_BYTES = 2
"""The bytes of a token of text in most vocabularies, at least."""


def read_prompt(options: GenerateOptions, context: int) -> Prompt:
    """Read the prompt that the options name and return it. Raises UsageError and NotFoundError.

    context: tokens, by which the fix for too large a file says what to cut.
    """
    if options.prompt_ids is not None:
        return Prompt(ids=_parse_token_ids(options.prompt_ids))
    shared = read_shared_prompt(options)
    if options.messages is not None:
        return shared
    text = _read_prompt_text(options, context)
    if options.raw:
        return Prompt(text=text)
    return replace(shared, messages=(*shared.messages, {"role": "user", "content": text}))


def read_shared_prompt(options: GenerateOptions) -> Prompt:
    """Read what precedes a prompt: a chat or the system message, and the template's variables.

    Raises UsageError and NotFoundError.
    """
    variables = template_variables(options)
    messages = () if options.messages is None else read_messages(options.messages)
    system = read_system_text(options.system)
    if system is not None:
        messages = ({"role": "system", "content": system},)
    return Prompt(messages=messages, variables=variables)


def _read_prompt_text(options: GenerateOptions, context: int) -> str:
    """Read stdin and files; return their texts and the argument, joined by blank lines.

    The final newline of each is dropped, but for the text that --raw continues. Raises UsageError.
    """
    files = options.file or []
    stdin = sys.stdin
    parts = [_read_prompt_part(name, context) for name in files]
    is_piped = stdin is not None and not stdin.closed and not is_terminal(stdin)
    if is_piped and "-" not in files and options.system != "@-":
        piped_text = _read_prompt_part("-", context)
        if piped_text:
            parts.insert(0, piped_text)
    if options.prompt is not None:
        parts.append(check_text(options.prompt, "the prompt"))
    if not parts:
        reason = "stdin is a terminal" if is_terminal(sys.stdin) else "stdin is empty"
        reason = f"No PROMPT argument and {reason}."
        fix = ['spd generate "your prompt"', 'echo "your prompt" | spd generate']
        raise UsageError("nothing to generate from", reason=[reason], fix=fix, code="no_prompt")
    files_end = len(parts) - (options.prompt is not None or options.raw)
    cut = [part.removesuffix("\n").removesuffix("\r") for part in parts[:files_end]]
    return "\n\n".join([*cut, *parts[files_end:]])


def _read_prompt_part(name: str, context: int) -> str:
    """Read the text of a file or stdin (-).

    The fix of the error for a too large one passes its end. context: tokens, by which that fix
    chooses how many bytes to pass.
    """
    try:
        return read_text(name)
    except UsageError as error:
        if error.code == "too_large":
            error.fix = (_cut_command(name, round(CUT_SHARE * context * LEAST_TOKEN_BYTES)),)
        raise


@contextmanager
def suggest_cut(
    options: GenerateOptions,
    prompt: Prompt,
    context: int,
    tokenizer: Callable[[], Tokenizer | None],
) -> Iterator[None]:
    """Add a command that cuts the text as first fix of a context overflow raised inside."""
    try:
        yield
    except IncompatibleError as error:
        opened_tokenizer = tokenizer() if error.code == "context_overflow" else None
        if opened_tokenizer is not None:
            error.fix = (*_cut_commands(options, prompt, context, opened_tokenizer), *error.fix)
        raise


def _cut_commands(
    options: GenerateOptions, prompt: Prompt, context: int, tokenizer: Tokenizer
) -> list[str]:
    """Return as a fix the command that passes only the end of the one file, or of stdin.

    Nothing for a chat, token ids, several files, or an argument that is most of the text.
    """
    files = [name for name in options.file or () if name != "-"]
    if options.messages is not None or prompt.ids is not None or len(files) > 1:
        return []
    text = prompt.messages[-1]["content"] if prompt.text is None else prompt.text
    argument_length = len(options.prompt or "")
    if len(text) <= 2 * argument_length:
        return []
    passed_text = text[: len(text) - argument_length][-2 * context :]
    size = int(
        CUT_SHARE * context * len(passed_text.encode()) / max(1, len(tokenizer.encode(passed_text)))
    )
    return [_cut_command(files[0] if files else "-", size)]


def _cut_command(name: str, size: int) -> str:
    """Return the command that passes the last bytes of a file or stdin, about `size`, to spd."""
    size -= size % 10 ** max(0, len(str(size)) - 2)
    command = f"… | tail -c {size}" if name == "-" else f"tail -c {size} {shlex.quote(name)}"
    return f"{command} | spd generate …"


def read_text(name: str) -> str:
    """Read a file or stdin (-) and return its text: at most 64 MiB of UTF-8, without a BOM.

    Raises UsageError and NotFoundError.
    """
    if not name:
        raise UsageError("the name of a file is empty", fix=["name a file, or - for stdin"])
    if name != "-" and os.path.isdir(name):
        raise UsageError(f"{name} is a folder, not a text file", fix=["name a file in it"])
    return read_input_text(name, "check the path; - reads stdin")


def read_system_text(value: str | None) -> str | None:
    """Return the text of -s, read from a file after @; None for None.

    Raises UsageError and NotFoundError.
    """
    if value is None:
        return None
    return check_text(
        read_text(value[1:]) if value.startswith("@") else value, "the system message"
    )


def _parse_token_ids(text: str) -> tuple[int, ...]:
    """Return token ids separated by commas or blanks. Raises UsageError."""
    with suppress(ValueError):
        ids = tuple(int(word) for word in text.replace(",", " ").split())
        if ids:
            return ids
    raise UsageError(
        f"--prompt-ids {text[:60]} is not a list of token ids", fix=["--prompt-ids 1,2,3"]
    )


def template_variables(options: ReplyOptions) -> dict[str, Any]:
    """Return the variables for the chat template: those of --template-arg, and enable_thinking.

    The former are JSON values (true, 3), else texts; the latter follows from --think. Raises
    UsageError.
    """
    variables: dict[str, Any] = {}
    for assignment in options.template_arg or ():
        name, equals, value = assignment.partition("=")
        if not equals or not name.isidentifier() or name in RESERVED_ARGS:
            message = f"--template-arg {assignment} is not NAME=VALUE"
            raise UsageError(message, fix=["--template-arg enable_thinking=false"])
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
    """Read the JSON value of a file, or of stdin (-).

    example: the fix for a text that is not JSON. Raises UsageError and NotFoundError.
    """
    try:
        return json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        source = "stdin" if name == "-" else name
        raise UsageError(f"{source} is not JSON: {error}", fix=[example]) from None


def read_messages(name: str) -> tuple[Mapping[str, Any], ...]:
    """Read and check the chat of a JSON file: a list of messages, or an object with `messages`.

    Raises UsageError and NotFoundError.
    """
    loaded = read_json(name, EXAMPLE_CHAT)
    source = "stdin" if name == "-" else name
    return check_messages(loaded.get("messages") if isinstance(loaded, dict) else loaded, source)


def read_grammar(options: GenerateOptions) -> GrammarSpec | None:
    """Return the schema, regex or Lark grammar of --schema or --grammar; None without either.

    A schema or Lark grammar is given inline or read from a file. Only that a schema is JSON is
    checked here. Raises UsageError and NotFoundError.
    """
    schema = options.schema
    if schema is not None:
        is_file = schema.lstrip()[:1] not in ("{", "") and schema.strip() not in ("true", "false")
        text = read_text(schema.removeprefix("@")) if is_file else schema
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = ["""--schema '{"type": "object"}'""", "--schema FILE"]
            raise UsageError(f"--schema is not JSON: {error}", fix=fix) from None
        return GrammarSpec("schema", text)
    grammar = options.grammar
    if grammar is not None:
        if len(grammar) > 1 and grammar[0] == grammar[-1] == "/":  # no file name ends in a slash
            return GrammarSpec("regex", grammar[1:-1])
        is_inline = re.search(r"^\s*[?!]*start\b[^\n]*:", grammar, re.MULTILINE) is not None
        return GrammarSpec("lark", grammar if is_inline else read_text(grammar))
    return None

"""What is asked, gathered: argument, files, stdin, chat files; checked as text, not yet as tokens.

Text is passed on as it is (NUL bytes and CRLF included); what is not UTF-8 is refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spd.cli.options import GenerateOptions, ReplyOptions, as_utf8
from spd.cli.text.output import is_terminal
from spd.errors import UsageError
from spd.formats.files import read_input_text

RESERVED_ARGS = frozenset({"messages", "add_generation_prompt"})


@dataclass(frozen=True)
class Asked:
    """One of: token ids, raw text, or the messages of a chat with the template's variables."""

    ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] | None = None


def gather(options: GenerateOptions) -> Asked:
    """Read everything the options name. Raises UsageError and NotFoundError."""
    if options.prompt_ids is not None:
        return Asked(ids=parse_ids(options.prompt_ids))
    variables = template_variables(options)
    if options.messages is not None:
        return Asked(messages=read_messages(options.messages), variables=variables)
    text = gather_text(options)
    if options.raw:
        return Asked(text=text)
    messages: list[Mapping[str, Any]] = []
    if (system := system_text(options.system)) is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text})
    return Asked(messages=tuple(messages), variables=variables)


def gather_text(options: GenerateOptions) -> str:
    """Stdin and files first, a blank line between parts, then the argument."""
    argument = options.prompt
    files = list(options.file or ())
    parts = []
    if "-" not in files and options.system != "@-" and _is_piped():
        piped = read_text("-")
        parts = [piped] if piped else []
    parts += [read_text(name) for name in files]
    if argument is not None:
        parts.append(check_text(argument, "the prompt"))
    if not parts:
        why = "stdin is a terminal" if is_terminal(sys.stdin) else "stdin is empty"
        raise UsageError(
            "nothing to generate from",
            reason=[f"No PROMPT argument and {why}."],
            fix=['spd generate "your prompt"', 'echo "your prompt" | spd generate'],
            code="no_prompt",
        )
    if len(parts) == 1:
        return parts[0] if options.raw else _without_last_newline(parts[0], argument is None)
    return "\n\n".join([_without_last_newline(part, True) for part in parts[:-1]] + [parts[-1]])


def _without_last_newline(text: str, from_file: bool) -> str:
    """Text without the newline that ends its last line in a file."""
    if not from_file:
        return text
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _is_piped() -> bool:
    """Whether stdin is there and not a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and not is_terminal(sys.stdin)


def read_text(name: str) -> str:
    """A file's or stdin's text (-), at most 64 MiB of UTF-8; a byte order mark is dropped."""
    if not name:
        raise UsageError("the name of a file is empty", fix=["name a file, or - for stdin"])
    if name != "-" and os.path.isdir(name):
        raise UsageError(f"{name} is a folder, not a text file", fix=[f"-f {name.rstrip('/')}/FILE"])
    return read_input_text(name, "check the path; - reads stdin")


def system_text(given: str | None) -> str | None:
    """What -s gives: a text, or with @ the text of a file. Raises UsageError and NotFoundError."""
    if given is None:
        return None
    if given.startswith("@"):
        return check_text(read_text(given[1:]), "the system message")
    return check_text(as_utf8(given), "the system message")


def check_text(text: str, what: str) -> str:
    """Text without lone surrogates, which is how undecodable bytes arrive. Raises UsageError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} is not Unicode text: a lone U+{ord(text[error.start]):04X} at character {error.start}",
            fix=["give UTF-8 text"],
        ) from None
    return text


def parse_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or blanks. Raises UsageError."""
    words = text.replace(",", " ").split()
    try:
        ids = tuple(int(word) for word in words)
    except ValueError:
        raise UsageError(
            f"--prompt-ids {text[:60]} is not a list of token ids", fix=["--prompt-ids 1,2,3"]
        ) from None
    if not ids:
        raise UsageError("--prompt-ids is empty", fix=["--prompt-ids 1,2,3"])
    return ids


def template_variables(options: ReplyOptions) -> dict[str, Any]:
    """What the options tell the chat template. Raises UsageError."""
    told = {} if options.think == "auto" else {"enable_thinking": options.think != "off"}
    return parse_variables(options.template_arg or ()) | told


def parse_variables(words: Sequence[str]) -> dict[str, Any]:
    """`k=v` words as template variables; v is read as JSON where it is JSON (true, 3), else as text."""
    variables: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier() or name in RESERVED_ARGS:
            raise UsageError(
                f"--template-arg {word} is not NAME=VALUE", fix=["--template-arg enable_thinking=false"]
            )
        try:
            variables[name] = json.loads(value)
        except (ValueError, RecursionError):
            variables[name] = check_text(value, "--template-arg")
    return variables


def read_messages(name: str) -> tuple[Mapping[str, Any], ...]:
    """A chat from a JSON file: a list of messages, or an object with `messages`. Raises UsageError."""
    shown = "stdin" if name == "-" else name
    fix = ['[{"role": "user", "content": "Hello"}]']
    try:
        loaded = json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{shown} is not JSON: {error}", fix=fix) from None
    if isinstance(loaded, dict):
        loaded = loaded.get("messages")
    return check_messages(loaded, shown)


def check_messages(loaded: Any, shown: str) -> tuple[Mapping[str, Any], ...]:
    """A JSON value as the messages of a chat. Raises UsageError naming where it was `shown`."""
    fix = ['[{"role": "user", "content": "Hello"}]']
    if not isinstance(loaded, list) or not loaded:
        raise UsageError(f"{shown} holds no list of messages", fix=fix)
    for number, message in enumerate(loaded):
        if not isinstance(message, dict):
            raise UsageError(f"{shown}: message {number} is not an object", fix=fix)
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise UsageError(f"{shown}: message {number} has no text in `{field}`", fix=fix)
        check_text(json.dumps(message, ensure_ascii=False), f"{shown}: message {number}")
    return tuple(loaded)

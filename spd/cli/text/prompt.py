"""What is asked, gathered: argument, files, stdin, chat files; checked as text, not yet as tokens.

Text is passed on as it is (NUL bytes and CRLF included); what is not UTF-8 is refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spd.cli.options import GenerateOptions, ReplyOptions
from spd.cli.text.output import is_terminal
from spd.errors import UsageError
from spd.formats.files import read_input_text

RESERVED_ARGS = frozenset({"messages", "add_generation_prompt"})
CHAT = '[{"role": "user", "content": "Hello"}]'


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
        return Asked(ids=_parse_ids(options.prompt_ids))
    variables = template_variables(options)
    if options.messages is not None:
        return Asked(messages=read_messages(options.messages), variables=variables)
    text = _gather_text(options)
    if options.raw:
        return Asked(text=text)
    messages: list[Mapping[str, Any]] = []
    if (system := system_text(options.system)) is not None:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text})
    return Asked(messages=tuple(messages), variables=variables)


def _gather_text(options: GenerateOptions) -> str:
    """Stdin and files first, without the newline at their ends, then the argument; blank lines between.

    What --raw continues is left as it is.
    """
    files, stdin = options.file or [], sys.stdin
    parts = [read_text(name) for name in files]
    is_piped = stdin is not None and not stdin.closed and not is_terminal(stdin)
    if is_piped and "-" not in files and options.system != "@-" and (piped := read_text("-")):
        parts.insert(0, piped)
    if options.prompt is not None:
        parts.append(check_text(options.prompt, "the prompt"))
    if not parts:
        why = "stdin is a terminal" if is_terminal(sys.stdin) else "stdin is empty"
        raise UsageError(
            "nothing to generate from",
            reason=[f"No PROMPT argument and {why}."],
            fix=['spd generate "your prompt"', 'echo "your prompt" | spd generate'],
            code="no_prompt",
        )
    files_end = len(parts) - (options.prompt is not None or options.raw)
    cut = [part.removesuffix("\n").removesuffix("\r") for part in parts[:files_end]]
    return "\n\n".join([*cut, *parts[files_end:]])


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
    return check_text(read_text(given[1:]) if given.startswith("@") else given, "the system message")


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


def _parse_ids(text: str) -> tuple[int, ...]:
    """Token ids separated by commas or blanks. Raises UsageError."""
    try:
        ids = tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        ids = ()
    if not ids:
        words = f"--prompt-ids {text[:60]} is not a list of token ids"
        raise UsageError(words, fix=["--prompt-ids 1,2,3"])
    return ids


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
    return variables if options.think == "auto" else variables | {"enable_thinking": options.think != "off"}


def read_json(name: str, example: str) -> Any:
    """The JSON of a file, or of stdin. Raises UsageError with an example."""
    try:
        return json.loads(read_text(name))
    except (ValueError, RecursionError) as error:
        shown = "stdin" if name == "-" else name
        raise UsageError(f"{shown} is not JSON: {error}", fix=[example]) from None


def read_messages(name: str) -> tuple[Mapping[str, Any], ...]:
    """A chat from a JSON file: a list of messages, or an object with `messages`. Raises UsageError."""
    loaded = read_json(name, CHAT)
    shown = "stdin" if name == "-" else name
    return check_messages(loaded.get("messages") if isinstance(loaded, dict) else loaded, shown)


def check_messages(loaded: Any, shown: str) -> tuple[Mapping[str, Any], ...]:
    """A JSON value as the messages of a chat. Raises UsageError naming where it was `shown`."""
    if not isinstance(loaded, list) or not loaded:
        raise UsageError(f"{shown} holds no list of messages", fix=[CHAT])
    for number, message in enumerate(loaded):
        where = f"{shown}: message {number}"
        if not isinstance(message, dict):
            raise UsageError(f"{where} is not an object", fix=[CHAT])
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise UsageError(f"{where} has no text in `{field}`", fix=[CHAT])
        check_text(json.dumps(message, ensure_ascii=False), where)
    return tuple(loaded)

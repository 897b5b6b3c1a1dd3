"""Chat messages to a prompt: the model's Jinja2 template, rendered in a child process with limits.

The child (`template_worker`) reads and writes lines of JSON. After a limit ended it, the next
request starts another; it ends with this process, because its input ends. The content of messages
stays plain text: <|im_end|> there does not end a message, while the same in the template does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from spd.errors import CheckpointError, EngineError, IncompatibleError, UsageError
from spd.formats.json_file import Fields, display_text, list_folder, one_line, read_text
from spd.formats.thinking import THINKING_SWITCHES, find_thinking_switch, switch_value
from spd.formats.tokenizer import Tokenizer
from spd.formats.tokenizer_config import TokenizerConfig, read_tokenizer_config

MAX_TEMPLATE_BYTES = 1_000_000  # bytes; the longest published template is below 50 kB
TEMPLATES_FOLDER = "additional_chat_templates"  # a file for each named template
_TEMPLATE_NAMES = ("default", "tool_use")
"""Names of the templates that are read: the one without tools, and the one for them."""
MAX_REPLY_BYTES = 1 << 30  # bytes
# Noncharacters of Unicode, reserved for use inside a program; then the private use area.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


class ChatTemplate:
    """The chat template of one model folder, and that for tools if it is separate."""

    def __init__(
        self, where: str, templates: Mapping[str, str], special_tokens: Mapping[str, object]
    ) -> None:
        self.default = templates["default"]
        self.separate_tools_template = templates.get("tool_use")
        self._where = where
        self._special_tokens = special_tokens
        self._process = TemplateProcess()

    @classmethod
    def open(cls, folder: Path, config: TokenizerConfig | None = None) -> ChatTemplate | None:
        """Read a folder's template, `None` without one; that of a separate file wins.

        config: tokens of the folder's files, where they were read before.
        """
        names = list_folder(folder)
        config = config or read_tokenizer_config(folder)
        special: dict[str, object] = {**config.roles, **config.named_tokens}
        if config.additional_tokens:
            special["additional_special_tokens"] = list(config.additional_tokens)
        where = str(folder)
        templates: dict[str, str] = {}
        if "chat_template.jinja" in names:
            where = str(folder / "chat_template.jinja")
            templates["default"] = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
        else:
            key = "chat_template"
            file_fields = Fields.read(folder / f"{key}.json") if f"{key}.json" in names else None
            fields = next(
                (source for source in (file_fields, config.fields) if source and key in source),
                None,
            )
            if fields is not None:
                where = f"{fields.where}: {key}"
                templates = _read_templates(fields, key)
        if TEMPLATES_FOLDER in names:
            named_templates = _read_named_templates(folder / TEMPLATES_FOLDER)
            where = where if templates else str(folder / TEMPLATES_FOLDER)
            templates |= named_templates
        if not templates:
            return None
        if "default" not in templates:
            message = f"has no template named default, only {display_text(sorted(templates))}"
            raise CheckpointError(f"{where}: {message}")
        return cls(where, templates, special)

    def start_process(self) -> None:
        """Start the process that renders, so that it is ready when it is asked."""
        with suppress(EngineError):  # rendering raises it again
            self._process.start()

    @property
    def tools_template(self) -> str:
        """The template that is rendered for a request with tools."""
        return self.separate_tools_template or self.default

    @property
    def supports_tools(self) -> bool:
        """True if the template writes tools into the prompt."""
        return "tools" in self.tools_template

    @cached_property
    def thinking_switch(self) -> str | None:
        """The variable that switches thinking; None where the template reads none."""
        return find_thinking_switch(self.default) or find_thinking_switch(
            self.separate_tools_template or ""
        )

    @cached_property
    def thinks_by_default(self) -> bool:
        """True if a prompt whose variables do not mention thinking asks for it."""
        probe = [{"role": "user", "content": "Hi"}]
        with suppress(IncompatibleError, CheckpointError):
            return self.render(probe) != self.render(probe, **{THINKING_SWITCHES[0]: False})
        return True

    def render(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """Return the prompt of messages; the template reads `variables` as in Hugging Face.

        `enable_thinking` gets the name that the template reads.

        Raises `IncompatibleError` when the template refuses the messages, `CheckpointError` when it
        is faulty, unsafe or beyond its limits, `UsageError` for messages that are no JSON values.
        """
        tool_use = self.separate_tools_template if variables.get("tools") is not None else None
        defaults = {"messages": list(messages), "add_generation_prompt": True}
        thinks = variables.get(THINKING_SWITCHES[0])
        if isinstance(thinks, bool) and self.thinking_switch not in (None, *variables):
            variables[str(self.thinking_switch)] = switch_value(str(self.thinking_switch), thinks)
        values = {**self._special_tokens, **defaults, "tools": None, "documents": None, **variables}
        reply = self._process.render(tool_use or self.default, values)
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise IncompatibleError(
                f"the chat template refuses these messages: {one_line(reply['refused'])}"
            )
        raise CheckpointError(f"{self._where}: {one_line(next(iter(reply.values())))}")


def _read_templates(fields: Fields, key: str) -> dict[str, str]:
    """Return the templates that a key holds, by name: one text, or a list of named ones."""
    value = fields.get(key)
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise fields.field_error(key, "is neither a string nor a list of named templates")
    fields.require(bool(entries), key, "has no template named default, only []")
    named = [Fields(f"{fields.where}: {key}", entry) for entry in entries]
    return {entry_fields.text("name"): entry_fields.text("template") for entry_fields in named}


def _read_named_templates(folder: Path) -> dict[str, str]:
    """Read the supported templates in a folder of named ones; return them by name."""
    if not folder.is_dir():
        return {}
    names = list_folder(folder)
    paths = {name: folder / f"{name}.jinja" for name in _TEMPLATE_NAMES if f"{name}.jinja" in names}
    return {name: read_text(path, MAX_TEMPLATE_BYTES) for name, path in paths.items()}


@dataclass(frozen=True)
class RenderedChat:
    """A rendered chat, with a `mark` inside special tokens' names in people's text."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        """The text without marks."""
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def suffix_after(self, beginning: str) -> RenderedChat | None:
        """Return the chat behind a beginning of its text; None where the text begins otherwise."""
        if not self.text.startswith(beginning):
            return None
        ends = [end for end, character in enumerate(self.marked, 1) if character != self.mark]
        return RenderedChat(self.marked[ends[len(beginning) - 1] if beginning else 0 :], self.mark)


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    *,
    continues: bool = False,
    **variables: object,
) -> RenderedChat:
    """Render a chat, with marks that distinguish people's text for `encode_rendered`.

    continues: end the text with the content of the last message, which the model continues. Raises
    what `ChatTemplate.render` raises, and IncompatibleError where the template does not write the
    last message's content as it is.
    """
    special = _special_pattern(tokenizer)
    # A mark inside a string keeps it from being the special token, whatever the template does with it.
    used_characters = {
        *_to_json([list(messages), variables], ensure_ascii=False),
        *template.default,
        *(template.separate_tools_template or ""),
    }
    unused = (chr(code) for code in _MARKS if chr(code) not in used_characters)
    mark = next(unused, None)
    end = next(unused, None)
    if mark is None or end is None:
        raise UsageError("the messages use every private character of Unicode")

    def mark_tokens(text: str) -> str:
        """Return a text with a mark inside each special token's name."""
        return special.sub(lambda match: _insert_mark(match[0], mark), text)

    marked = [_map_mapping(message, mark_tokens) for message in messages]
    marked_variables = _map_mapping(variables, mark_tokens)
    is_changed = marked != list(messages) or marked_variables != variables
    used_mark = mark if is_changed else ""
    if not continues:
        return RenderedChat(template.render(marked, **marked_variables), used_mark)
    marked[-1]["content"] = f"{marked[-1]['content']}{end} "
    marked_variables["add_generation_prompt"] = False
    rendered = template.render(marked, **marked_variables)
    return RenderedChat(_text_before(rendered, end), used_mark)


def _text_before(rendered: str, end: str) -> str:
    """Return the text before the mark `end`, which a blank followed in the message.

    A template that trims messages dropped that blank, and would have trimmed the content too.
    """
    text, separator, suffix = rendered.rpartition(end)
    if not separator:
        message = "the chat template does not write the last message as it is"
        raise IncompatibleError(f"{message}, so a reply that is begun cannot be continued")
    return text if suffix.startswith(" ") else text.rstrip()


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
    """Return the token ids of a rendered chat or a part; pieces with a mark are plain text."""
    mark = rendered.mark
    if not mark:
        return tokenizer.encode(rendered.marked, parse_special=True)
    pieces = re.split(f"((?<!{mark})(?:{_special_pattern(tokenizer).pattern}))", rendered.marked)
    ids: list[int] = []
    for is_plain, run in groupby(pieces, lambda piece: mark in piece):
        text = "".join(run).replace(mark, "")
        ids += tokenizer.encode(text, parse_special=not is_plain) if text else []
    return ids


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return the pattern of the special tokens' names, the longest first."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _insert_mark(name: str, mark: str) -> str:
    """Return a special token's name with a mark inside."""
    return name[0] + mark + name[1:] if len(name) > 1 else mark + name


def _map_mapping(mapping: Mapping[str, object], change: Callable[[str], str]) -> dict[str, object]:
    """Return a mapping with all strings in its keys and values changed."""
    return {change(key): _map_strings(value, change) for key, value in mapping.items()}


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    """Return a JSON value with all its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        members = value.items()
        return {_map_strings(key, change): _map_strings(child, change) for key, child in members}
    if isinstance(value, list | tuple):
        return [_map_strings(child, change) for child in value]
    return value


def isolated_command(program: str) -> list[str]:
    """Return the command that runs Python code with this process's imports.

    -I leaves that folder and PYTHON* variables out. spd itself stays where it lies in the working
    folder.
    """
    home = str(Path(__file__).resolve().parents[2])
    there = [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
    trusted = [path for path in there if path == home or not os.path.samefile(path, os.curdir)]
    code = f"import sys; sys.path[:] = dict.fromkeys(sys.argv[2:] + sys.path + sys.argv[1:2]); {program}"
    return [sys.executable, "-I", "-c", code, home, *trusted]


class TemplateProcess:
    """One worker process, used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Mapping[str, object]) -> dict[str, str]:
        """Return the reply of `render_template`, or {"limit": ...} after a limit ended the child.

        Raises `EngineError` when the worker cannot be started, `UsageError` for what is not JSON.
        """
        request = _to_json({"source": source, "variables": dict(variables)}).encode()
        reply: dict[str, str] | None = None
        with self._lock:
            process = self.start()
            assert process.stdin is not None and process.stdout is not None
            try:
                with suppress(OSError, ValueError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                    reply = json.loads(process.stdout.readline(MAX_REPLY_BYTES))
            finally:
                # Also after an interrupt: the pending reply must not be read by another request.
                if reply is None or "memory" in reply:
                    _end_process(process)
        if reply is None and process.returncode > 0:
            raise EngineError(f"the chat template worker ended with status {process.returncode}")
        return reply or {"limit": "takes too much time or memory"}

    def start(self) -> subprocess.Popen[bytes]:
        """Return the worker, started unless it runs. Raises `EngineError` when it cannot be."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _start_process()
                weakref.finalize(self, _end_process, self._process)
            return self._process


def _start_process() -> subprocess.Popen[bytes]:
    """Start a worker and return it. Raises EngineError when it cannot be started."""
    code = "from spd.formats.template_worker import main; main()"
    pipe = subprocess.PIPE
    try:  # in a separate session: Ctrl-C in the terminal must not reach the worker
        return subprocess.Popen(
            isolated_command(code),
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        message = f"cannot start the chat template worker: {error.strerror or error}"
        raise EngineError(message) from None


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker, close its pipes, and wait until it has ended."""
    process.kill()
    # Closes the pipes and waits; a request that was not read cannot be flushed.
    with suppress(OSError), process:
        pass


def _to_json(value: object, *, ensure_ascii: bool = True) -> str:
    """Return a value as JSON. Raises `UsageError` for a value without a JSON form."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the messages are not JSON, or nested too deeply: {error}") from None

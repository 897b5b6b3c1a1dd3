"""Chat messages to a prompt: the model's own Jinja2 template, rendered in a limited child process.

The child (`template_worker`) reads and writes lines of JSON. One that a limit ended is started anew by the
next request; it ends by itself when this process does, because its input ends. What is written in messages
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from spd.errors import CheckpointError, EngineError, IncompatibleError, UsageError
from spd.formats.json_file import Fields, display_text, list_folder, one_line, read_text
from spd.formats.thinking import THINKING_SWITCHES, find_thinking_switch, switch_value
from spd.formats.tokenizer import Tokenizer
from spd.formats.tokenizer_config import TokenizerConfig, read_tokenizer_config

TEMPLATE_LIMIT = 1_000_000  # bytes; the longest published template is below 50 kB
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named templates, a file each
_USED_TEMPLATES = ("default", "tool_use")
REPLY_LIMIT = 1 << 30  # bytes
# Noncharacters of Unicode, reserved for use inside a program; then the private use area.
_MARKS = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))


class ChatTemplate:
    """The chat template of one model folder: the text of it, and of the one for tools if it is another."""

    def __init__(
        self, where: str, templates: Mapping[str, str], special_tokens: Mapping[str, Any]
    ) -> None:
        self.default = templates["default"]
        self.separate_tools_template = templates.get("tool_use")
        self._where = where
        self._special_tokens = special_tokens
        self._process = TemplateProcess()

    @classmethod
    def open(cls, folder: Path, config: TokenizerConfig | None = None) -> ChatTemplate | None:
        """Return a folder's template, `None` when it has none; a file of its own wins.

        config: where it was read.
        """
        names = list_folder(folder)
        config = config or read_tokenizer_config(folder)
        special: dict[str, Any] = {**config.roles, **config.named_tokens}
        if config.additional_tokens:
            special["additional_special_tokens"] = list(config.additional_tokens)
        where = str(folder)
        templates: dict[str, str] = {}
        if "chat_template.jinja" in names:
            where = str(folder / "chat_template.jinja")
            templates["default"] = read_text(folder / "chat_template.jinja", TEMPLATE_LIMIT)
        else:
            key = "chat_template"
            own = Fields.read(folder / f"{key}.json") if f"{key}.json" in names else None
            fields = next((each for each in (own, config.fields) if each and key in each), None)
            if fields is not None:
                where = f"{fields.where}: {key}"
                templates = _listed_templates(fields, key)
        if MORE_TEMPLATES in names:
            more = _more_templates(folder / MORE_TEMPLATES)
            where = where if templates else str(folder / MORE_TEMPLATES)
            templates |= more
        if not templates:
            return None
        if "default" not in templates:
            why = f"has no template named default, only {display_text(sorted(templates))}"
            raise CheckpointError(f"{where}: {why}")
        return cls(where, templates, special)

    @property
    def tools_template(self) -> str:
        """The text that is rendered where tools are given."""
        return self.separate_tools_template or self.default

    @property
    def supports_tools(self) -> bool:
        """True if the template has a place for tools."""
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

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for messages; `variables` reach the template as they would in Hugging Face.

        `enable_thinking` reaches it by the name that the template reads.

        Raises `IncompatibleError` when the template refuses the messages, `CheckpointError` when it is
        faulty, unsafe or beyond its limits, `UsageError` for messages that are no JSON values.
        """
        tool_use = self.separate_tools_template if variables.get("tools") is not None else None
        known = {"messages": list(messages), "add_generation_prompt": True}
        thinks = variables.get(THINKING_SWITCHES[0])
        if isinstance(thinks, bool) and self.thinking_switch not in (None, *variables):
            variables[str(self.thinking_switch)] = switch_value(str(self.thinking_switch), thinks)
        values = {**self._special_tokens, **known, "tools": None, "documents": None, **variables}
        reply = self._process.render(tool_use or self.default, values)
        if "text" in reply:
            return reply["text"]
        if "refused" in reply:
            raise IncompatibleError(
                f"the chat template refuses these messages: {one_line(reply['refused'])}"
            )
        raise CheckpointError(f"{self._where}: {one_line(next(iter(reply.values())))}")


def _listed_templates(fields: Fields, key: str) -> dict[str, str]:
    """Return the templates that a key holds, by name: one text, or a list of named ones."""
    value = fields.get(key)
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise fields.field_error(key, "is neither a string nor a list of named templates")
    fields.require(bool(entries), key, "has no template named default, only []")
    named = [Fields(f"{fields.where}: {key}", entry) for entry in entries]
    return {each.text("name"): each.text("template") for each in named}


def _more_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a folder of them that are used here, by name."""
    if not folder.is_dir():
        return {}
    names = list_folder(folder)
    paths = {name: folder / f"{name}.jinja" for name in _USED_TEMPLATES if f"{name}.jinja" in names}
    return {name: read_text(path, TEMPLATE_LIMIT) for name, path in paths.items()}


@dataclass(frozen=True)
class RenderedChat:
    """A chat as its template writes it; a `mark` stands inside special tokens' names that people wrote."""

    marked: str
    mark: str = ""

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "") if self.mark else self.marked

    def suffix_after(self, beginning: str) -> RenderedChat | None:
        """What follows a beginning of the text; None where the text begins otherwise."""
        if not self.text.startswith(beginning):
            return None
        ends = [end for end, character in enumerate(self.marked, 1) if character != self.mark]
        return RenderedChat(self.marked[ends[len(beginning) - 1] if beginning else 0 :], self.mark)


def render_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    continues: bool = False,
    **variables: Any,
) -> RenderedChat:
    """Return the chat as text that `encode_rendered` can tell the template's tokens in from people's words.

    continues: end the text with the content of the last message, which the model is to go on with.
    Raises what `ChatTemplate.render` raises, and IncompatibleError where the template does not write
    the last message's content as it is.
    """
    special = _special_pattern(tokenizer)
    values: list[Any] = [list(messages), variables]
    # A mark inside keeps a string from being the special token through whatever the template does.
    used = {
        *_as_json(values, ensure_ascii=False),
        *template.default,
        *(template.separate_tools_template or ""),
    }
    unused = (chr(code) for code in _MARKS if chr(code) not in used)
    mark = next(unused, None)
    end = next(unused, None)
    if mark is None or end is None:
        raise UsageError("the messages use every private character of Unicode")
    hidden = _replaced(values, lambda text: special.sub(lambda m: _broken(m[0], mark), text))
    used_mark = mark if hidden != values else ""
    if not continues:
        return RenderedChat(template.render(hidden[0], **hidden[1]), used_mark)
    last = hidden[0][-1]
    hidden[0][-1] = {**last, "content": f"{last['content']}{end} "}
    variables = {**hidden[1], "add_generation_prompt": False}
    return RenderedChat(_until(template.render(hidden[0], **variables), end), used_mark)


def _until(rendered: str, end: str) -> str:
    """Return what stands before the mark `end`, behind which a blank followed.

    A template that trims a message has dropped that blank, and would have trimmed the content too.
    """
    text, found, rest = rendered.rpartition(end)
    if not found:
        words = "the chat template does not write the last message as it is"
        raise IncompatibleError(f"{words}, so a reply that is begun cannot be continued")
    return text if rest.startswith(" ") else text.rstrip()


def encode_rendered(tokenizer: Tokenizer, rendered: RenderedChat) -> list[int]:
    """Token ids of a rendered chat or a part; what has a mark between two special tokens is plain text."""
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
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or "(?!)")


def _broken(name: str, mark: str) -> str:
    return name[0] + mark + name[1:] if len(name) > 1 else mark + name


def _replaced(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_replaced(key, change): _replaced(item, change) for key, item in value.items()}
    return [_replaced(item, change) for item in value] if isinstance(value, list | tuple) else value


def isolated_command(program: str) -> list[str]:
    """The command that runs Python code with this process's imports, but with none from the working folder.

    -I keeps that folder and PYTHON* variables out. Where spd itself lies in the working folder it stays.
    """
    home = str(Path(__file__).resolve().parents[2])
    there = [path for path in sys.path if os.path.isabs(path) and os.path.exists(path)]
    trusted = [path for path in there if path == home or not os.path.samefile(path, os.curdir)]
    code = f"import sys; sys.path[:] = dict.fromkeys(sys.argv[2:] + sys.path + sys.argv[1:2]); {program}"
    return [sys.executable, "-I", "-c", code, home, *trusted]


class TemplateProcess:
    """One worker, asked by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Mapping[str, Any]) -> dict[str, str]:
        """The worker's answer (see `template_worker.render`), or {"limit": ...} where a limit ended it.

        Raises `EngineError` when the worker cannot be started, `UsageError` for what is not JSON.
        """
        request = _as_json({"source": source, "variables": dict(variables)}).encode()
        reply: dict[str, str] | None = None
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                with suppress(OSError, ValueError):
                    process.stdin.write(request + b"\n")
                    process.stdin.flush()
                    reply = json.loads(process.stdout.readline(REPLY_LIMIT))
            finally:
                # Also where an interrupt came: the answer still to come must not meet another question.
                if reply is None or "memory" in reply:
                    _end(process)
        if reply is None and process.returncode > 0:
            raise EngineError(f"the chat template worker ended with status {process.returncode}")
        return reply or {"limit": "takes too much time or memory"}

    def _start(self) -> subprocess.Popen[bytes]:
        code = "from spd.formats.template_worker import main; main()"
        pipe = subprocess.PIPE
        try:  # in a session of its own: Ctrl-C in the terminal is not for the worker
            self._process = process = subprocess.Popen(
                isolated_command(code),
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(
                f"cannot start the chat template worker: {error.strerror or error}"
            ) from None
        weakref.finalize(self, _end, process)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with (
        suppress(OSError),
        process,
    ):  # closes, waits; what was not read of a request cannot be flushed
        pass


def _as_json(value: object, *, ensure_ascii: bool = True) -> str:
    """Raises `UsageError` for what is not JSON."""
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the messages are not JSON, or nested too deeply: {error}") from None

"""Tools of a chat: functions that the model may call; each runs a local command after consent.

The file is JSON: a list of objects with `name`, `description`, `parameters` (a JSON schema) and
`command`, a list of words in which {name} stands for an argument. No shell interprets them; a word
whose argument is missing from a call is left out.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from spd.cli.chat.conversation import Turn
from spd.cli.prompt_input import read_json
from spd.cli.signals import SignalGuard
from spd.cli.terminal.console import write_stderr, write_stderr_line
from spd.cli.terminal.plain_text import as_line, shorten
from spd.conversation.fields import (
    OBJECT,
    TEXT,
    FieldError,
    array_of,
    object_of,
    refuse,
)
from spd.conversation.messages import for_template
from spd.conversation.reply import ReplyBuilder
from spd.conversation.tool_choice import (
    function_name,
    function_tool,
    past_arguments,
    read_tools,
)
from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE, checked_form
from spd.conversation.tools.call_forms import FALLBACK_FORM
from spd.conversation.tools.schema_arguments import Arguments
from spd.conversation.vocabulary import Vocabulary
from spd.errors import IncompatibleError, UsageError
from spd.runtime.engine.request import Event

EXAMPLE_FILE = """[{"name": "show", \
"parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, \
"command": ["cat", "{path}"]}]"""
"""A valid file, shown beside an error."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
"""A parameter's name in braces, in a word of a command."""
COMMAND_SECONDS = 120.0
"""The time limit of a command."""
MAX_OUTPUT_BYTES = 8 << 20
"""The limit of a command's output."""
MODEL_OUTPUT_LIMIT = 32_000
"""Characters of the output that the model gets: its beginning and end."""
MAX_COMMAND_LENGTH = 4_000
"""The most characters of a command that may run: all are shown before consent."""
INVISIBLE_LETTERS = "\u115f\u1160\u3164\uffa0"
"""Letters that are invisible; they are shown escaped."""
_TOOL_FIELDS = {
    "name": function_name,
    "description": TEXT,
    "parameters": OBJECT,
    "command": array_of(TEXT, 256),
}
"""Checks of a tool's fields in a file of tools."""
_parse_tools = array_of(object_of(_TOOL_FIELDS, "name", "command"), 128)
"""Checks and returns the tools of a file."""


class ChatTools:
    """The tools of a file for one model; reads the file.

    Raises UsageError naming file and field, NotFoundError, and IncompatibleError if the model's
    template has no place for tools.
    """

    def __init__(self, file: str, vocabulary: Vocabulary) -> None:
        template = vocabulary.need_template()
        self._template = template.tools_template
        self._tokenizer = vocabulary.need_tokenizer()
        self.notes = [UNKNOWN_FORM_NOTE] if checked_form(template) is FALLBACK_FORM else []
        """Notes about the tools that the user may not expect."""
        self._marks = vocabulary.marks
        if not template.supports_tools:
            message = (
                f"--tools {file}: the chat template of {vocabulary.name} has no place for tools"
            )
            fix = ["a model that knows tools", "leave --tools out"]
            raise IncompatibleError(message, fix=fix, code="no_tools")
        try:
            tools = _parse_tools(read_json(file, EXAMPLE_FILE), "tools")
            self._commands = {
                tool["name"]: _checked_command(tool, f"tools[{index}]")
                for index, tool in enumerate(tools)
            }
            self.definitions = [function_tool(tool) for tool in tools]
            """The tools as chat templates get them."""
            self._tools = read_tools(self.definitions, template, self._tokenizer)
        except FieldError as error:
            raise UsageError(f"{file}: {error.message}", fix=[EXAMPLE_FILE]) from None

    def parse_calls(self, turn: Turn, inside_thinking: bool) -> dict[str, Any] | None:
        """Return a reply as a message with its tool calls; None if it has none.

        inside_thinking: the reply begins inside the model's thinking.
        """
        choice = ReplyBuilder(0, inside_thinking, self._tools, self._tokenizer, marks=self._marks)
        choice.add_event(Event("", turn.reply_ids, turn.reply or "", "stop"))
        message = choice.message()
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = past_arguments(call["function"]["arguments"], "")
        return for_template(message, self._template) if choice.calls else None

    def run_call(self, call: Mapping[str, Any], guard: SignalGuard) -> tuple[dict[str, Any], bool]:
        """Run a call's command after asking; return the result as a message, and True if allowed.

        For an unknown tool nothing is asked or run. Prints the first 200 characters of the result.
        """
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        text = f"there is no tool {name}"
        is_allowed = True
        if name in self._commands:
            argument_values = json.loads(arguments) if isinstance(arguments, str) else arguments
            values = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in argument_values.items()
            }
            complete_words = (
                word
                for word in self._commands[name]
                if values.keys() >= {*PLACEHOLDER.findall(word)}
            )
            command = [
                PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in complete_words
            ]
            is_allowed = ask_consent(command, guard)
            text = (
                run_tool_command(command, guard)
                if is_allowed
                else "the user did not allow this call"
            )
        write_stderr_line(f"     {shorten(text, 200)}")
        return {
            "role": "tool",
            "content": text,
            "tool_call_id": call["id"],
            "name": name,
        }, is_allowed


def _checked_command(tool: Mapping[str, Any], field: str) -> Sequence[str]:
    """Return a tool's command: a fixed program, and placeholders of its parameters only.

    field: the tool's place in the file, for errors. Raises FieldError.
    """
    parameter_names = Arguments(tool.get("parameters", {})).names
    for index, word in enumerate(tool["command"]):
        for parameter in PLACEHOLDER.findall(word):
            if not index or parameter not in parameter_names:
                reason = (
                    f"{{{parameter}}} is not among its parameters"
                    if index
                    else "the program has to be fixed"
                )
                refuse(f"{field}.command[{index}]", reason)
    command: Sequence[str] = tool["command"]
    return command or refuse(f"{field}.command", "expected a program and its arguments")


def ask_consent(command: Sequence[str], guard: SignalGuard) -> bool:
    """Show a command in full and ask whether to run it; True if the user types yes.

    Input typed before the question is dropped. Ctrl-C means no. A command longer than
    `MAX_COMMAND_LENGTH` is refused without asking.
    """
    line = as_line(shlex.join(command))
    visible = (
        ascii(letter)[1:-1] if letter in INVISIBLE_LETTERS or not letter.isprintable() else letter
        for letter in line
    )
    display_text = "".join(visible)
    if len(display_text) > MAX_COMMAND_LENGTH:
        write_stderr(
            f"not run: a command of {len(display_text):,} characters, more than {MAX_COMMAND_LENGTH:,}\n"
        )
        return False
    interrupt = partial(signal.default_int_handler, signal.SIGINT, None)
    with suppress(KeyboardInterrupt), guard.intercept_sigint(interrupt):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        write_stderr(f"run  {display_text}\nrun it? [y/N] ")
        return sys.stdin.buffer.readline().strip().lower() in (b"y", b"yes")
    write_stderr("\n")
    return False


def _descendant_pids(process: int) -> set[int]:
    """Return the process ids of all descendants of a process; empty without /proc (Linux)."""
    processes = {process}
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_bytes().rpartition(b")")[2].split()[1])
    while True:
        children = {child for child, parent in parents.items() if parent in processes}
        if children <= processes:
            return processes - {process}
        processes |= children


def run_tool_command(command: Sequence[str], guard: SignalGuard) -> str:
    """Run a command; return its stdout and stderr, and how it ended if that was not success.

    It gets no input. Ctrl-C, the time limit and too much output kill it with all its descendants.
    The middle of an output longer than `MODEL_OUTPUT_LIMIT` is left out.
    """
    stopped = threading.Event()
    deadline = time.monotonic() + COMMAND_SECONDS
    output = bytearray()
    note = ""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"(it cannot be run: {error})"
    with process, guard.intercept_sigint(stopped.set):
        is_open = True
        assert process.stdout is not None
        source = process.stdout.fileno()
        try:
            while not note:
                # A descendant may hold the output open after the process has ended.
                has_ended = process.poll() is not None
                if select.select([source] * is_open, (), (), 0.0 if has_ended else 0.05)[0]:
                    data = os.read(source, 1 << 16)
                    is_open = bool(data)
                    output = output + data
                elif has_ended:
                    break
                if stopped.is_set():
                    note = "it was stopped"
                elif time.monotonic() > deadline or len(output) > MAX_OUTPUT_BYTES:
                    limits = f"{COMMAND_SECONDS:g} s, or {MAX_OUTPUT_BYTES >> 20} MiB"
                    note = f"it was ended: more than {limits}"
        finally:
            descendants = _descendant_pids(process.pid)
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            for descendant in descendants:
                with suppress(OSError):
                    os.kill(descendant, signal.SIGKILL)
    if not note and process.returncode:
        note = f"exit status {process.returncode}"
    text = output.decode("utf-8", "replace")
    num_omitted = len(text) - MODEL_OUTPUT_LIMIT
    if num_omitted > 0:
        half = MODEL_OUTPUT_LIMIT // 2
        text = f"{text[:half]}\n… {num_omitted:,} characters are left out …\n{text[-half:]}"
    return f"{text}\n({note})" if note else text

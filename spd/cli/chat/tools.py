"""Tools of a chat: functions that the model may call, each a command of this machine that runs after a yes.

The file is JSON: a list of objects with `name`, `description`, `parameters` (a JSON schema) and `command`, a
list of words in which {name} stands for an argument. No shell reads them; a word whose argument a call leaves
out is left out.
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
from spd.cli.terminal.console import tell, write_stderr
from spd.cli.terminal.plain_text import as_line, shortened
from spd.conversation.fields import (
    OBJECT,
    TEXT,
    FieldError,
    array_of,
    refuse,
    strict_object,
)
from spd.conversation.messages import for_template
from spd.conversation.reply import ReplyBuilder
from spd.conversation.tool_choice import (
    function_name,
    function_tool,
    past_arguments,
    read_tools,
)
from spd.conversation.tools.call_check import UNKNOWN_FORM, checked_form
from spd.conversation.tools.call_forms import FALLBACK_FORM
from spd.conversation.tools.schema_arguments import Arguments
from spd.conversation.vocabulary import Vocabulary
from spd.errors import IncompatibleError, UsageError
from spd.runtime.engine.request import Event

EXAMPLE = """[{"name": "show", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, \
"command": ["cat", "{path}"]}]"""
PLACE = re.compile(r"\{(\w+)\}")
SECONDS = 120.0
"""For which a command may run."""
MOST = 8 << 20
"""Bytes that a command may write."""
OUTPUT_LIMIT = 32_000
"""Characters of them that the model gets: their beginning and end."""
SHOWN = 4_000
"""Characters of a command that may be asked for, all of them shown."""
BLANK = "\u115f\u1160\u3164\uffa0"
"""Letters that are not seen."""
_TOOL = {
    "name": function_name,
    "description": TEXT,
    "parameters": OBJECT,
    "command": array_of(TEXT, 256),
}
_tools = array_of(strict_object(_TOOL, "name", "command"), 128)


class ChatTools:
    """The tools of a file, for one model. Raises UsageError naming file and field, and IncompatibleError."""

    def __init__(self, file: str, vocabulary: Vocabulary) -> None:
        template = vocabulary.need_template()
        self._template = template.tools_template
        self._tokenizer = vocabulary.need_tokenizer()
        self.notes = [UNKNOWN_FORM] if checked_form(template) is FALLBACK_FORM else []
        """What the user may not expect of them."""
        self._marks = vocabulary.marks
        if not template.supports_tools:
            words = f"--tools {file}: the chat template of {vocabulary.name} has no place for tools"
            fix = ["a model that knows tools", "leave --tools out"]
            raise IncompatibleError(words, fix=fix, code="no_tools")
        try:
            found = _tools(read_json(file, EXAMPLE), "tools")
            self._commands = {
                tool["name"]: _checked(tool, f"tools[{at}]") for at, tool in enumerate(found)
            }
            self.shown = [function_tool(tool) for tool in found]
            """As chat templates are told of them."""
            self._tools = read_tools(self.shown, template, self._tokenizer)
        except FieldError as error:
            raise UsageError(f"{file}: {error.message}", fix=[EXAMPLE]) from None

    def called(self, turn: Turn, inside: bool) -> dict[str, Any] | None:
        """A reply as a message with its calls; None where it has none. `inside` as in `ThinkingSplitter`."""
        choice = ReplyBuilder(0, inside, self._tools, self._tokenizer, marks=self._marks)
        choice.add_event(Event("", turn.reply_ids, turn.reply or "", "stop"))
        message = choice.message()
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = past_arguments(call["function"]["arguments"], "")
        return for_template(message, self._template) if choice.calls else None

    def result(self, call: Mapping[str, Any], guard: SignalGuard) -> tuple[dict[str, Any], bool]:
        """What a call brings, as a message, and whether the model may go on with it."""
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        text = f"there is no tool {name}"
        may_go_on = True
        if name in self._commands:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            values = {
                key: one if isinstance(one, str) else json.dumps(one) for key, one in given.items()
            }
            there = (
                each for each in self._commands[name] if values.keys() >= {*PLACE.findall(each)}
            )
            words = [PLACE.sub(lambda place: values[place[1]], each) for each in there]
            may_go_on = consents(words, guard)
            text = run(words, guard) if may_go_on else "the user did not allow this call"
        tell(f"     {shortened(text, 200)}")
        return {
            "role": "tool",
            "content": text,
            "tool_call_id": call["id"],
            "name": name,
        }, may_go_on


def _checked(tool: Mapping[str, Any], name: str) -> Sequence[str]:
    """A tool's command, whose program is fixed and whose places are arguments. Raises FieldError."""
    known = Arguments(tool.get("parameters", {})).names
    for at, word in enumerate(tool["command"]):
        for place in PLACE.findall(word):
            if not at or place not in known:
                why = (
                    f"{{{place}}} is not among its parameters"
                    if at
                    else "the program has to be fixed"
                )
                refuse(f"{name}.command[{at}]", why)
    words: Sequence[str] = tool["command"]
    return words or refuse(f"{name}.command", "expected a program and its arguments")


def consents(words: Sequence[str], guard: SignalGuard) -> bool:
    """Show a whole command and ask whether to run it: what was typed before the question is no yes."""
    line = as_line(shlex.join(words))
    visible = (ascii(one)[1:-1] if one in BLANK or not one.isprintable() else one for one in line)
    if len(shown := "".join(visible)) > SHOWN:
        write_stderr(f"not run: a command of {len(shown):,} characters, more than {SHOWN:,}\n")
        return False
    interrupt = partial(signal.default_int_handler, signal.SIGINT, None)
    with suppress(KeyboardInterrupt), guard.soften(interrupt):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        write_stderr(f"run  {shown}\nrun it? [y/N] ")
        return sys.stdin.buffer.readline().strip().lower() in (b"y", b"yes")
    write_stderr("\n")
    return False


def _started_by(process: int) -> set[int]:
    """What a running process has started, and what that has, where the system tells it (Linux)."""
    found = {process}
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_bytes().rpartition(b")")[2].split()[1])
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {process}


def run(words: Sequence[str], guard: SignalGuard) -> str:
    """A command's output with its errors, and how it ended where that is not well.

    It gets no input, and is ended with all that it has started by Ctrl-C, by time and by too much output.
    """
    stopped = threading.Event()
    ends = time.monotonic() + SECONDS
    output = bytearray()
    note = ""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        process = subprocess.Popen(words, **pipes, start_new_session=True)  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        return f"(it cannot be run: {error})"
    with process, guard.soften(stopped.set):
        reading = True
        source = process.stdout.fileno()
        try:
            while not note:
                over = process.poll() is not None  # what it has started may still hold its output
                if select.select([source] * reading, (), (), 0.0 if over else 0.05)[0]:
                    data = os.read(source, 1 << 16)
                    reading = bool(data)
                    output = output + data
                elif over:
                    break
                if stopped.is_set():
                    note = "it was stopped"
                elif time.monotonic() > ends or len(output) > MOST:
                    note = f"it was ended: more than {SECONDS:g} s, or {MOST >> 20} MiB"
        finally:
            left = _started_by(process.pid)
            for end, one in ((os.killpg, process.pid), *((os.kill, each) for each in left)):
                with suppress(OSError):
                    end(one, signal.SIGKILL)
    if not note and process.returncode:
        note = f"exit status {process.returncode}"
    text = output.decode("utf-8", "replace")
    if (lost := len(text) - OUTPUT_LIMIT) > 0:
        half = OUTPUT_LIMIT // 2
        text = f"{text[:half]}\n… {lost:,} characters are left out …\n{text[-half:]}"
    return f"{text}\n({note})" if note else text

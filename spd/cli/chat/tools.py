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
from typing import TYPE_CHECKING, Any

from spd.cli.serve.body import OBJECT, TEXT, ApiError, fields, listed, refuse
from spd.cli.serve.forms import Tools, call_form, properties_of
from spd.cli.serve.replies import Choice
from spd.cli.serve.wishes import for_template, function, name_of, past_arguments
from spd.cli.text.output import as_line, shortened, tell, write_stderr
from spd.cli.text.prompt import read_json
from spd.errors import IncompatibleError, UsageError
from spd.runtime.engine.request import Event

if TYPE_CHECKING:
    from spd.cli.chat.conversation import Turn
    from spd.cli.signals import SignalGuard
    from spd.cli.text.job import Vocabulary

EXAMPLE = """[{"name": "show", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}, \
"command": ["cat", "{path}"]}]"""
PLACE = re.compile(r"\{(\w+)\}")
SECONDS = 120.0
"""For which a command may run."""
OUTPUT_LIMIT = 32_000
"""Bytes of a command's output that the model gets: its beginning and its end."""
SHOWN = 4_000
"""Characters of a command that are shown before it runs."""
_tools = listed(
    fields(
        {"name": name_of, "description": TEXT, "parameters": OBJECT, "command": listed(TEXT, 256)},
        *("name", "command"),
    ),
    128,
)


class ChatTools:
    """The tools of a file, for one model. Raises UsageError naming file and field, and IncompatibleError."""

    def __init__(self, file: str, vocabulary: Vocabulary) -> None:
        template = vocabulary.need_template()
        self._template, self._tokenizer = template.tool_use or template.default, vocabulary.need_tokenizer()
        if "tools" not in self._template:
            raise IncompatibleError(
                f"--tools {file}: the chat template of {vocabulary.name} has no place for tools",
                fix=["a model that knows tools", "leave --tools out"],
                code="no_tools",
            )
        try:
            found = _tools(read_json(file, EXAMPLE), "tools")
            self._commands = dict[str, Sequence[str]]()
            for at, tool in enumerate(found):
                if tool["name"] in self._commands:
                    refuse(f"tools[{at}].name", f"{tool['name']} is given twice")
                self._commands[tool["name"]] = _checked(tool, f"tools[{at}]")
        except ApiError as error:
            raise UsageError(f"{file}: {error.message}", fix=[EXAMPLE]) from None
        self.shown = [function(tool) for tool in found]
        """As chat templates are told of them."""
        schemas = {tool["name"]: tool.get("parameters", {}) for tool in found}
        self._form = Tools(schemas, call_form(self._template), special=self._tokenizer.special_tokens)

    def called(self, turn: Turn, inside: bool) -> dict[str, Any] | None:
        """A reply as a message with its calls; None where it has none. `inside` as in `ThinkingSplitter`."""
        choice = Choice(0, inside, self._form, (), self._tokenizer)
        choice.take(Event("", turn.reply_ids, turn.reply or "", "stop"))
        message = choice.message()
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = past_arguments(call["function"]["arguments"], "")
        return for_template(message, self._template) if choice.calls else None

    def result(self, call: Mapping[str, Any], guard: SignalGuard) -> tuple[dict[str, Any], bool]:
        """What a call brings, as a message, and whether the model may go on with it."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text, may_go_on = f"there is no tool {name}", True
        if name in self._commands:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            words = _filled(self._commands[name], given)
            may_go_on = consents(words, guard)
            text = run(words, guard) if may_go_on else "the user did not allow this call"
        tell(f"     {shortened(text, 200)}")
        return {"role": "tool", "content": text, "tool_call_id": call["id"], "name": name}, may_go_on


def _filled(words: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """A command with its arguments; texts stand as they are, other values as JSON."""
    values = {name: one if isinstance(one, str) else json.dumps(one) for name, one in given.items()}
    return [
        PLACE.sub(lambda place: values[place[1]], word)
        for word in words
        if all(name in values for name in PLACE.findall(word))
    ]


def _checked(tool: Mapping[str, Any], name: str) -> Sequence[str]:
    """A tool's command, whose program is fixed and whose places are arguments. Raises ApiError."""
    known = properties_of(tool.get("parameters", {}))
    for at, word in enumerate(tool["command"]):
        for place in PLACE.findall(word):
            if not at or place not in known:
                why = f"{{{place}}} is not among its parameters" if at else "the program has to be fixed"
                refuse(f"{name}.command[{at}]", why)
    return tool["command"] or refuse(f"{name}.command", "expected a program and its arguments")


def consents(words: Sequence[str], guard: SignalGuard) -> bool:
    """Show a command and ask whether to run it: what was typed before the question is no yes."""
    shown, cut = as_line(shlex.join(words)), ""
    if len(shown) > SHOWN:
        half = SHOWN // 2
        cut = f" … {len(shown) - SHOWN:,} characters are not shown … "
        shown = shown[:half] + cut + shown[-half:]
    write_stderr(f"run  {shown}\nrun it? [y/N] ")
    with suppress(KeyboardInterrupt), guard.soften(_interrupt):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        return sys.stdin.buffer.readline(1024).strip().lower() in (b"y", b"yes")
    write_stderr("\n")
    return False


def _interrupt() -> None:
    raise KeyboardInterrupt


def run(words: Sequence[str], guard: SignalGuard) -> str:
    """A command's output with its errors, and how it ended where that is not well.

    It gets no input, and is ended by Ctrl-C and when its time is over, with all that it has started.
    """
    stopped, ends = threading.Event(), time.monotonic() + SECONDS
    output, size, note = bytearray(), 0, ""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"(it cannot be run: {error})"
    assert process.stdout is not None
    with process, guard.soften(stopped.set):
        reading, source = True, process.stdout.fileno()
        try:
            while not note:
                over = process.poll() is not None  # what it has started may still hold its output
                if select.select([source] * reading, (), (), 0.0 if over else 0.05)[0]:
                    data = os.read(source, 1 << 16)
                    reading, size, output = bool(data), size + len(data), output + data
                    if len(output) > 2 * OUTPUT_LIMIT:
                        del output[OUTPUT_LIMIT // 2 : -OUTPUT_LIMIT // 2]
                elif over:
                    break
                if stopped.is_set() or time.monotonic() > ends:
                    note = "it was stopped" if stopped.is_set() else f"it was ended after {SECONDS:g} s"
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    if not note and process.returncode:
        note = f"exit status {process.returncode}"
    if size > OUTPUT_LIMIT:
        half = OUTPUT_LIMIT // 2
        cut = f"\n… {size - OUTPUT_LIMIT:,} bytes are left out …\n".encode()
        output = output[:half] + cut + output[-half:]
    return output.decode("utf-8", "replace") + f"\n({note})" * bool(note)

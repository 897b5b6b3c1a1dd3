"""The child process that renders chat templates: Jinja2 in its sandbox, under hard limits.

A template is a program from an untrusted folder. Python cannot stop `'a' * 10**10` or a filter that
pads to a gigabyte, so the kernel does: CPU time is limited by a timer, memory by a resource limit.
Requests and replies are JSON, a line each.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import traceback
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 0.5
CPU_SECONDS_PER_INPUT_BYTE = 1e-7
"""The time that a request may take, in addition to `CPU_SECONDS`."""
MEMORY_BYTES = 256 << 20
"""Memory of a template, in addition to the interpreter's and the messages'."""
MEMORY_PER_INPUT_BYTE = 40
OUTPUT_CHARACTERS = 1 << 20
"""Characters of a prompt, in addition to those of the messages."""


class TemplateRefusal(Exception):
    """`raise_exception` in a template: the template refuses these messages."""


class GenerationBlock(Extension):
    """`{% generation %}`, which marks the assistant's part for training.

    Here it is a plain block.
    """

    tags = {"generation"}  # noqa: RUF012 - the attribute that Jinja2 reads

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's content in a scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's environment.

    Unsafe access is an error at once, not an empty value as in the sandbox.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        self.filters["tojson"] = _dump_json
        del self.filters["random"]  # the same messages must give the same prompt
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_refusal
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Raise SecurityError for access to an unsafe attribute."""
        raise SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} is unsafe"
        )


def _dump_json(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None, **layout: Any
) -> str:
    """Return JSON as it is; Jinja2's filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


def _raise_refusal(message: object) -> NoReturn:
    """Raise TemplateRefusal: the template's `raise_exception`."""
    raise TemplateRefusal(str(message))


def render_template(
    jinja: TemplateEnvironment, source: str, variables: dict[str, object], limit: int
) -> dict[str, str]:
    """Render a template to {"text": ...}, {"refused": ...}, {"faulty": ...} or {"memory": ...}.

    limit: characters of the text.
    """
    try:
        parts = []
        length = 0
        for part in jinja.from_string(source).generate(**variables):
            length += len(part)
            if length > limit:
                return {"faulty": f"writes more than {limit} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"memory": "needs too much memory"}
    except RecursionError:
        return {"faulty": "is nested too deeply or calls itself without end"}
    except TemplateRefusal as error:
        return {"refused": str(error)}
    except TemplateError as error:  # a syntax error has its line
        return {"faulty": f"{_line_prefix(error)}{error.message}"}
    except Exception as error:  # a template may raise any exception
        return {"faulty": f"{_line_prefix(error)}{type(error).__name__}: {error}"}


def _line_prefix(error: BaseException) -> str:
    """Return the line of a template for the beginning of a message; empty where it is unknown."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = (frame.lineno for frame in reversed(frames) if frame.filename == "<template>")
    line = getattr(error, "lineno", None) or next(lines, None)
    return f"line {line}: " if line else ""


def main() -> None:
    """Answer requests {"source", "variables"} of standard input by `render_template` until it ends.

    Sets limits of memory and CPU time for each; a request beyond the time ends the process.
    """
    environment = TemplateEnvironment()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            occupied = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        occupied = 512 << 20
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process, inside C code too
    for line in sys.stdin.buffer:
        memory = occupied + MEMORY_BYTES + MEMORY_PER_INPUT_BYTE * len(line)
        with suppress(ValueError, OSError):  # some systems have the limit but refuse to set it
            soft = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS + CPU_SECONDS_PER_INPUT_BYTE * len(line))
        result = render_template(
            environment, **json.loads(line), limit=OUTPUT_CHARACTERS + len(line)
        )
        # The timer stops before the reply: no reply may arrive from a process about to end.
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()

"""`spd doctor`: whether this machine can run `spd`, looked at and tried out, with what to do where not."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.options import CommonOptions, Session, printed
from spd.cli.text.output import Sink, check_writable, is_terminal, to_json, write_file
from spd.cli.text.progress import loading

if TYPE_CHECKING:
    from spd.runtime.lab import Finding

MARKS = {"ok": "✓", "warning": "!", "failed": "✗"}
PLAIN_MARKS = {"ok": "[ok]", "warning": "[!]", "failed": "[x]"}
TOKEN = re.compile(r"\b(?:hf_|sk-|gh[a-z]_|api_)[A-Za-z0-9_-]{8,}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(CommonOptions):
    """Everything `spd doctor` takes."""

    quick: bool = printed(False, None, "Look only: compile and generate nothing.")
    json: bool = printed(False, None, "One JSON object: every check with its facts.")
    bug_report: Path | None = printed(None, "FILE", "Write that object there, without names and secrets.")


def doctor(session: Session, options: DoctorOptions) -> int:
    """Check this machine and try it out: compile, time, compare; exits 1 if a check failed."""
    from spd.runtime.lab import Step, steps

    if options.bug_report is not None:
        check_writable(options.bug_report)
    sink = Sink.stdout()
    marks = MARKS if sink.is_unicode else PLAIN_MARKS
    asked = steps(quick=options.quick)
    asked.insert(2, Step("terminal", lambda: terminal(session.console.color)))
    done: dict[str, Finding] = {}
    checks: list[dict[str, Any]] = []
    for step in asked:
        began = time.perf_counter()
        with loading(f"{step.name}: trying", session.console) if step.slow else nullcontext():
            finding = done[step.name] = step.run(done)
        checks.append({"name": step.name, **asdict(finding), "seconds": time.perf_counter() - began})
        if not options.json:
            line = f"{marks[finding.status]} {step.name:<13}  {finding.line}"
            sink.write_lines([line, *(f"    fix: {fix}" for fix in finding.fix)])
    failed, warned = (
        sum(each.status == status for each in done.values()) for status in ("failed", "warning")
    )
    shown = {"schema": "spd.doctor/1", "ok": not failed, "checks": checks}
    if options.json:
        sink.write(to_json(shown) + "\n")
    else:
        counts = [
            f"{count} {word}{'s' if count > 1 else ''}"
            for count, word in ((failed, "problem"), (warned, "warning"))
            if count
        ]
        sink.write_lines([f"{', '.join(counts)} · details: spd doctor --json" if counts else "all is well"])
    if options.bug_report is not None:
        text = json.dumps(json.loads(to_json(shown)), indent=1, ensure_ascii=False) + "\n"
        write_file(options.bug_report, redacted(text, Path.home(), platform.node()))
        session.console.note(f"wrote {options.bug_report}; read it before you send it")
    return 1 if failed else 0


def redacted(text: str, home: Path, host: str) -> str:
    """Text without the home folder, the names of user and machine, and anything shaped like a token."""
    for folder in sorted({str(home), str(home.resolve())}, key=len, reverse=True):
        if len(folder) > 1:
            text = text.replace(folder, "~")
    for name, sign in ((home.name, "USER"), (host, "HOST")):
        if len(name) > 2:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", sign, text)
    return TOKEN.sub("TOKEN", text)


def terminal(color: bool) -> Finding:
    """Encoding and colour of the streams."""
    from spd.runtime.lab import OK, WARNING, Finding

    there = is_terminal(sys.stdout)
    encoding = (getattr(sys.stdout, "encoding", None) or "none").lower()
    facts = {"stdout": there, "stderr": is_terminal(sys.stderr), "encoding": encoding, "color": color}
    line = f"standard output is {'a' if there else 'not a'} terminal · {encoding}"
    line += " · colour" if color else " · no colour"
    if there and "utf" not in encoding:
        return Finding(WARNING, f"{line}: some text cannot be shown", ("export LANG=C.UTF-8",), facts)
    return Finding(OK, line, (), facts)

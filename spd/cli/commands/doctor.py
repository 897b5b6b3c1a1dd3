"""`spd doctor`: whether this machine can run `spd`, looked at and tried out, with what to do where not."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.options import CommonOptions, Session, printed
from spd.cli.text.output import Sink, check_writable, is_terminal, to_json, write_file
from spd.cli.text.progress import loading

if TYPE_CHECKING:
    from spd.runtime.lab import Finding

MARKS = {"ok": "✓", "warning": "!", "failed": "✗"}
PLAIN_MARKS = {"ok": "[ok]", "warning": "[!]", "failed": "[x]"}
NAME_WIDTH = 13
TOKEN = re.compile(r"\b(?:hf_|sk-|gh[a-z]_|api_)[A-Za-z0-9_-]{8,}")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(CommonOptions):
    """Everything `spd doctor` takes."""

    quick: bool = printed(False, None, "Look only: compile and generate nothing.")
    json: bool = printed(False, None, "One JSON object: every check with its facts.")
    bug_report: Path | None = printed(
        None, "FILE", "Write versions, plan and checks there, without names and secrets."
    )


def doctor(session: Session, options: DoctorOptions) -> int:
    """Check this machine and try it out: compile, time, compare; exits 1 if a check failed."""
    from spd.runtime.lab import FAILED, Step, steps

    if options.bug_report is not None:
        check_writable(options.bug_report)
    sink = Sink.stdout()
    marks = MARKS if _holds_marks() else PLAIN_MARKS
    asked = steps(quick=options.quick)
    asked.insert(6, Step("terminal", lambda: terminal(session.console.color)))
    done: dict[str, Finding] = {}
    checks: list[dict[str, Any]] = []
    for step in asked:
        began = time.perf_counter()
        with loading(f"{step.name}: trying", session.console) if step.slow else nullcontext():
            finding = step.run(done)
        done[step.name] = finding
        checks.append(_as_json(step.name, finding, time.perf_counter() - began))
        if not options.json:
            sink.write_lines(_lines(marks[finding.status], step.name, finding))
    good = all(finding.status != FAILED for finding in done.values())
    if options.json:
        sink.write(to_json({"schema": "spd.doctor/1", "ok": good, "checks": checks}) + "\n")
    else:
        sink.write_lines([_summary(done)])
    if options.bug_report is not None:
        write_report(options.bug_report, checks)
        session.console.note(f"wrote {options.bug_report}; read it before you send it")
    return 0 if good else 1


def write_report(path: Path, checks: list[dict[str, Any]]) -> None:
    """A file for a bug report: versions, system and every check. Raises UsageError."""
    from spd import __version__

    uname = platform.uname()
    report = {
        "schema": "spd.bug-report/1",
        "spd": __version__,
        "python": sys.version,
        "system": [uname.system, uname.release, uname.machine],
        "checks": checks,
    }
    text = json.dumps(report, indent=1, ensure_ascii=False, default=str) + "\n"
    write_file(path, redacted(text, Path.home(), uname.node))


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

    on_terminal = is_terminal(sys.stdout)
    encoding = (getattr(sys.stdout, "encoding", None) or "none").lower()
    facts = {"stdout": on_terminal, "stderr": is_terminal(sys.stderr), "encoding": encoding, "color": color}
    words = (
        "standard output is a terminal" if on_terminal else "standard output is not a terminal",
        encoding,
        "colour" if color else "no colour",
    )
    line = " · ".join(words)
    if on_terminal and "utf" not in encoding:
        return Finding(WARNING, f"{line}: some text cannot be shown", ("export LANG=C.UTF-8",), facts)
    return Finding(OK, line, (), facts)


def _holds_marks() -> bool:
    if not is_terminal(sys.stdout):
        return True  # what is not a terminal gets UTF-8
    try:
        "".join(MARKS.values()).encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _as_json(name: str, finding: Finding, seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "status": finding.status,
        "line": finding.line,
        "fix": list(finding.fix),
        "facts": dict(finding.facts),
        "seconds": round(seconds, 4),
    }


def _lines(mark: str, name: str, finding: Finding) -> list[str]:
    lines = [f"{mark} {name:<{NAME_WIDTH}}  {finding.line}"]
    lines += [f"    fix: {fix}" for fix in finding.fix]
    return lines


def _summary(done: dict[str, Finding]) -> str:
    from spd.runtime.lab import FAILED, WARNING

    counts = []
    for status, word in ((FAILED, "problem"), (WARNING, "warning")):
        number = sum(finding.status == status for finding in done.values())
        if number:
            counts.append(f"{number} {word}" + ("s" if number > 1 else ""))
    return f"{', '.join(counts)} · details: spd doctor --json" if counts else "all is well"

"""`spd doctor`: whether this machine can run `spd`, looked at and tried out, with what to do where not."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spd.cli.options import CommonOptions, printed
from spd.cli.text.output import Session, Sink, is_terminal, to_json
from spd.cli.text.progress import loading

if TYPE_CHECKING:
    from spd.runtime.lab import Finding

MARKS = {"ok": "✓", "warning": "!", "failed": "✗"}
PLAIN_MARKS = {"ok": "[ok]", "warning": "[!]", "failed": "[x]"}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(CommonOptions):
    """Everything `spd doctor` takes."""

    quick: bool = printed(False, None, "Look only: compile and generate nothing.")
    json: bool = printed(False, None, "One JSON object: every check with its facts.")


def doctor(session: Session, options: DoctorOptions) -> int:
    """Check this machine and try it out: compile, generate, compare; exits 1 if a check failed."""
    from spd.runtime.lab import Step, steps

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
    return 1 if failed else 0


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

"""`spd doctor`, which checks this machine, and `spd completions`."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from spd.cli.options import CommonOptions, JsonOptions, argument, output_option
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import loading, ticking
from spd.cli.terminal.sink import Sink, to_json


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DoctorOptions(JsonOptions):
    """The options of `spd doctor`."""

    quick: bool = output_option(False, None, "Look only: compile and generate nothing.")


def doctor(session: Session, options: DoctorOptions) -> int:
    """Check this machine and try it out: compile, generate, compare; the exit code is 1 if a check failed.

    Examples:
      spd doctor --quick --json
    """
    from spd.runtime.lab import Finding, diagnostic_steps

    sink = Sink.stdout()
    findings: dict[str, Finding] = {}
    checks: list[dict[str, object]] = []
    for step in diagnostic_steps(quick=options.quick):
        start = time.perf_counter()
        with (
            loading(f"{step.name}: trying", session.console)
            if step.slow
            else ticking(session.console)
        ):
            finding = findings[step.name] = step.run(findings)
        checks.append(
            {"name": step.name, **asdict(finding), "seconds": time.perf_counter() - start}
        )
        if not options.json:
            line = f"{finding.status:<8}  {step.name:<12}  {finding.line}"
            sink.write_lines([line, *(f"    fix: {fix}" for fix in finding.fix)])
    num_failed = sum(finding.status == "failed" for finding in findings.values())
    if options.json:
        sink.write(
            to_json({"schema": "spd.doctor/1", "ok": not num_failed, "checks": checks}) + "\n"
        )
    else:
        sink.write_lines(
            [f"{num_failed or 'no'} problem{'s' * (num_failed != 1)} · details: spd doctor --json"]
        )
    return 1 if num_failed else 0


COMPLETION_SCRIPT_FILES = {"bash": "spd.bash", "zsh": "_spd", "fish": "spd.fish"}
"""The file of each shell's completion script."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CompletionOptions(CommonOptions):
    """The options of `spd completions`."""

    shell: Literal["bash", "zsh", "fish"] = argument("SHELL", "The shell whose script is printed.")


def completions(session: Session, options: CompletionOptions) -> None:
    """Print the completion script of a shell.

    Examples:
      eval "$(spd completions bash)"
      spd completions fish > ~/.config/fish/completions/spd.fish
    """
    script = Path(__file__).parent.with_name("completions") / COMPLETION_SCRIPT_FILES[options.shell]
    Sink.stdout().write(script.read_text(encoding="utf-8"))

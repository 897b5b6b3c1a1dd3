"""Loading the engine of a command, and the notes before it runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spd.cli.terminal.console import Console, Session
from spd.cli.terminal.progress import compiling, loading
from spd.cli.terminal.streams import is_terminal

if TYPE_CHECKING:
    from spd.conversation.settings import Settings
    from spd.runtime import Engine, EngineClient, EngineConfig, Request

LONG_LOAD = 3.0
"""Seconds of loading from which on a note recommends a running server."""


def load_engine(
    session: Session, name: str, config: EngineConfig, *, recommends_server: bool = False
) -> Engine:
    """Load an engine and return it; show progress on a terminal meanwhile.

    recommends_server: print a note after a long load, unless kernels were compiled during it.
    name: the model, as messages call it. Raises Interrupted where a signal came meanwhile, even if
    a callback of the loader swallowed its exception.
    """
    console = session.console
    compile_reports: list[str] = []
    with loading(f"loading {name}", console) as progress, compiling(compile_reports.append):
        from spd.runtime import Engine

        engine = Engine(config, progress=progress)
    session.guard.raise_if_received()
    if recommends_server and not compile_reports:
        _print_load_note(console, name, engine)
    return engine


def print_run_notes(
    console: Console, settings: Settings, engine: EngineClient, request: Request | None
) -> None:
    """Print notes about what the user may not expect, and the plan of a verbose run.

    request: the only request of the run; None if there are many.
    """
    from spd.conversation.notes import notes_before_run

    notes = notes_before_run(engine.info, settings.think, settings.vocabulary, request)
    print_notes(console, notes, engine, settings.sampling.describe())


def _print_load_note(console: Console, name: str, engine: Engine) -> None:
    """Print a note with the command that keeps a model loaded, after a long load on a terminal."""
    if engine.load_ms >= 1000 * LONG_LOAD and is_terminal(sys.stderr):
        command = f"spd serve --detach -m {shlex.quote(name)}"
        seconds = engine.load_ms / 1000
        console.note(f"loading took {seconds:.1f} s; {command} keeps the model loaded")


def print_notes(
    console: Console, notes: Sequence[str], engine: EngineClient, parameters: Mapping[str, object]
) -> None:
    """Print notes; in a verbose run also the plan, the parameters and the seconds of loading."""
    for note in notes:
        console.note(note)
    if console.verbose:
        from spd.cli.terminal.tables import PIPE_COLUMNS, Size, fact_lines

        load = f"{engine.load_ms / 1000:.2f} s"
        plan = {
            name: Size(value) if name.endswith("_bytes") else value
            for name, value in engine.info.plan.items()
        }
        run_facts = {"plan": plan, "params": parameters, "load": load}
        columns = None if is_terminal(sys.stderr) else PIPE_COLUMNS
        for line in fact_lines(run_facts, columns=columns):
            console.detail(line)

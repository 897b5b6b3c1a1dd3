"""Runs spd's command line for each line of its input, each in a child of a process that has it
loaded.

    python -m benchmarks.suites.hostile_worker SECONDS

A line is a JSON list of arguments; the answer is a JSON object with `status` (None where the time
ran out), `seconds`, `mib` (the largest memory) and `text` (what was printed, the end of it).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from typing import BinaryIO

FILE_BYTES = 256 << 20
"""A child's files may not grow beyond this: a copy of an endless file ends with an error."""
CPU_SECONDS = 10
"""A child that computes for longer is ended: the machine may be busy with other work meanwhile."""
SHOWN = 1500
LOADED = (
    "spd.cli.app",
    "spd.cli.commands.inspect",
    "spd.cli.commands.convert",
    "spd.cli.commands.generate",
    "spd.runtime.engine.engine",
    "spd.runtime.load.quantize",
)
"""Modules that are imported before children are made, with torch; none of them starts a thread."""


def run_child(arguments: list[str], output: BinaryIO) -> int:
    """Start spd in a child of its own group; return its id."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from spd.__main__ import main

    sys.argv = ["spd", *arguments]
    try:
        status = main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    sys.stdout.flush()
    os._exit(int(status or 0))


def wait(child: int, seconds: float) -> tuple[int | None, float]:
    """Return a child's status, None where it was ended at its time, and its largest memory in
    MiB.
    """
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    _, _, usage = os.wait4(child, 0)
    return None, usage.ru_maxrss / 1024


def main() -> None:
    """Answer each line."""
    for name in LOADED:
        importlib.import_module(name)
    limit = float(sys.argv[1])
    for line in sys.stdin:
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            status, mib = wait(run_child(json.loads(line), output), limit)
            output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN))
            text = output.read().decode("utf-8", "replace")
        result = {"status": status, "seconds": time.monotonic() - began, "mib": mib, "text": text}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

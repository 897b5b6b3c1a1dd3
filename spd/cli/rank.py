"""The process of a rank other than rank 0, without terminal and arguments; it ends with its parent.

Under torchrun a rank other than 0 starts one such process for each engine of rank 0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

from spd.cli.terminal.console import write_stderr
from spd.errors import EngineError
from spd.runtime.ranks.follower import EXIT_LEADER_LOST, NO_ANSWER_TEXT, follow_leader
from spd.runtime.ranks.rendezvous import END_KEY, RankSpec, connect_torchrun_store, next_engine

ENGINE_COMMANDS = ("generate", "chat", "serve", "bench", "verify")
"""Commands that run engines."""
LOST_LEADER_MESSAGE = f"error: rank 0: {NO_ANSWER_TEXT}\n"
"""The error on standard error where rank 0 no longer answers the others."""


def main() -> None:
    """Serve as the rank that the JSON line on standard input describes, then end the process."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 decides what they mean
    spec: RankSpec = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_watch_parent, daemon=True).start()
    status = 1
    try:
        status = follow_leader(spec, lambda status: _exit_rank(spec, status))
    finally:
        os._exit(status)  # threads inside a library would keep the process alive


def _watch_parent() -> None:
    """Exit when the parent has died: its end of the pipe is closed then."""
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


def _exit_rank(spec: RankSpec, status: int) -> None:
    """End this process; before that, kill a rank 0 that is its parent and hangs.

    Rank 1 writes the error to rank 0's standard error.
    """
    if status == EXIT_LEADER_LOST and os.getppid() == spec.get("leader"):
        with suppress(OSError):
            os.kill(spec["leader"], signal.SIGKILL)
            if spec["rank"] == 1:
                os.write(spec["stderr"], LOST_LEADER_MESSAGE.encode())
    os._exit(status)


def run_rank(rank: int, argv: list[str], local_rank: str) -> int:
    """Start a process for each engine of rank 0 until that has ended; return the exit status.

    argv: the command line, which starts nothing for a command without engines. local_rank: the
    number of the GPU on this machine. Prints an error if rank 0 is lost.
    """
    from spd.runtime import start_rank_process  # imports torch

    if not any(word in ENGINE_COMMANDS for word in argv):
        return 0
    store = connect_torchrun_store()
    crew_number = 1
    processes: list[subprocess.Popen[bytes]] = []
    try:
        while not store.check([END_KEY]):
            if any(process.poll() == EXIT_LEADER_LOST for process in processes):
                write_stderr(LOST_LEADER_MESSAGE)
                return EngineError.exit_code
            crew_spec = next_engine(store, crew_number)
            if crew_spec is not None:
                crew_number += 1
                if rank < crew_spec["tp"]:
                    device = "cpu" if crew_spec["device"] == "cpu" else f"cuda:{local_rank}"
                    processes.append(
                        start_rank_process({**crew_spec, "rank": rank, "device": device})
                    )
    except RuntimeError:  # the store has ended, and rank 0 with it
        pass
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
    return 0


def release_ranks() -> None:
    """Tell the other ranks through the store that rank 0 has ended."""
    with suppress(EngineError, RuntimeError):
        connect_torchrun_store().set(END_KEY, "")

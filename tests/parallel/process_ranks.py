"""Ranks as processes, for tests: who they are, whether they have gone, and faults to plant in them."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from spd.runtime import Engine
from spd.runtime.ranks import communicator, leader
from spd.runtime.ranks.communicator import ProcessGroup
from spd.runtime.ranks.leader import PROGRAM
from spd.runtime.round.local_queue import LocalRoundQueue
from tests.helpers import Patch

ENDS_WITHIN = 30  # Seconds in which a run whose rank is lost has to end.
LOOK = 0.05  # Seconds between two looks at whether something has come true.
COUNTED = """
import json
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.ranks import communicator, leader
from spd.runtime.ranks.communicator import ProcessGroup

def counted(name, received):
    honest = getattr(ProcessGroup, name)
    def counting(group, tensor):
        found = honest(group, tensor)
        calls, nbytes = getattr(group, "traffic", (0, 0))
        group.traffic = calls + 1, nbytes + received(group, tensor)
        return found
    setattr(ProcessGroup, name, counting)

counted("gather", lambda group, part: part.nbytes * (group.size - 1))
counted("broadcast", lambda group, tensor: tensor.nbytes if group.rank else 0)
met = []

def meet(*arguments, honest=communicator.open_ranks):
    met.append(honest(*arguments))
    return met[-1]

def tell(device, number):
    ranks = met[-1]
    names = ("target", "draft", "broadcast_group")
    found = {name: getattr(getattr(ranks, name), "traffic", (0, 0)) for name in names}
    with open(FOLDER + f"/{ranks.target.rank}-{number}", "w") as file:
        json.dump(found, file)

communicator.open_ranks = leader.open_ranks = meet
LocalRoundQueue.tell = tell
"""  # Makes every rank count collectives and the bytes it received, by group, and tell.


def count_traffic(patch: Patch, folder: Path) -> Callable[[Engine], dict[int, Any]]:
    """Count in engines made from now on; returns what asks all ranks of one what they have counted."""
    program = COUNTED.replace("FOLDER", repr(str(folder)))
    patch.setattr(leader, "PROGRAM", f"{program}\n{PROGRAM}")
    for owner, name in (
        (ProcessGroup, "gather"),
        (ProcessGroup, "broadcast"),
        (communicator, "open_ranks"),
        (leader, "open_ranks"),
    ):
        patch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    patch.setattr(LocalRoundQueue, "tell", None, raising=False)
    exec(program, {})
    numbers = count()

    def ask(engine: Engine) -> dict[int, Any]:
        number = next(numbers)
        ranks = engine.plan.shape.tp
        engine.round_queue.order(engine.round_queue.queue.tell, number)  # type: ignore[attr-defined]
        places = [folder / f"{rank}-{number}" for rank in range(ranks)]
        assert wait_until(
            lambda: all(place.exists() and place.read_text() for place in places), ENDS_WITHIN
        )
        return {rank: json.loads(place.read_text()) for rank, place in enumerate(places)}

    return ask


def leader_of(engine: Engine) -> Any:
    return engine.round_queue.leader  # type: ignore[attr-defined]


def pids(engine: Engine) -> list[int]:
    return [process.pid for process in leader_of(engine)._processes.values()]


def gone(pid: int) -> bool:
    """Whether a process has ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Counted in looks, not by the clock: where a machine stops its programs, it stops this one too."""
    for _ in range(round(seconds / LOOK)):
        if true():
            return True
        time.sleep(LOOK)
    return true()


@contextmanager
def nothing_is_left(engine: Engine) -> Iterator[None]:
    started = pids(engine)
    shared = shared_memory(pids(engine))
    yield
    assert wait_until(lambda: all(map(gone, started)), ENDS_WITHIN)
    assert not any(map(Path.exists, shared))


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found += map(int, (task / "children").read_text().split())
    return found


def shared_memory(processes: list[int]) -> set[Path]:
    """Files of shared memory that processes have open or mapped; none of those that have ended."""
    files = []
    for pid in processes:
        with suppress(OSError):
            files += [
                line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            ]
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    files.append(os.readlink(descriptor))
    return {Path(file) for file in files if file.startswith("/dev/shm/")}


@contextmanager
def most_memory() -> Iterator[dict[int, int]]:
    """The most bytes of its own that each process started by this one has held meanwhile, by its number."""
    held: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for pid in children(os.getpid()):
                with suppress(OSError, StopIteration):
                    if PROGRAM.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        continue  # still a copy of this process
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    own = next(line for line in lines if line.startswith("RssAnon:"))
                    held[pid] = max(held.get(pid, 0), 1024 * int(own.split()[1]))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield held
    finally:
        done.set()
        watch.join()

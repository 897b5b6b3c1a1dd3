"""Ranks as processes, for tests: their ids, whether they have ended, and planted faults."""

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
from spd.runtime.ranks.leader import RANK_PROGRAM
from spd.runtime.round.local_queue import LocalRoundQueue
from tests.helpers import Patch

ENDS_WITHIN = 30
"""Seconds in which a run whose rank is lost has to end."""
POLL_SECONDS = 0.05
"""Seconds between two checks of a condition."""
COUNTING_PROGRAM = """
import json
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.ranks import communicator, leader
from spd.runtime.ranks.communicator import ProcessGroup

def count_calls(name, received):
    original = getattr(ProcessGroup, name)
    def counting(group, tensor):
        result = original(group, tensor)
        calls, nbytes = getattr(group, "traffic", (0, 0))
        group.traffic = calls + 1, nbytes + received(group, tensor)
        return result
    setattr(ProcessGroup, name, counting)

count_calls("gather", lambda group, part: part.nbytes * (group.size - 1))
count_calls("broadcast", lambda group, tensor: tensor.nbytes if group.rank else 0)
opened = []

def open_and_record(*arguments, original=communicator.open_ranks, **keywords):
    opened.append(original(*arguments, **keywords))
    return opened[-1]

def write_traffic(device, number):
    ranks = opened[-1]
    names = ("target", "draft", "broadcast_group")
    traffic = {name: getattr(getattr(ranks, name), "traffic", (0, 0)) for name in names}
    with open(FOLDER + f"/{ranks.target.rank}-{number}", "w") as file:
        json.dump(traffic, file)

communicator.open_ranks = leader.open_ranks = open_and_record
LocalRoundQueue.write_traffic = write_traffic
"""
"""Makes every rank count collectives and received bytes by group, and write them on an order."""


def count_traffic(patch: Patch, folder: Path) -> Callable[[Engine], dict[int, Any]]:
    """Count in engines made from now on; return a reader of the counts of all ranks."""
    program = COUNTING_PROGRAM.replace("FOLDER", repr(str(folder)))
    patch.setattr(leader, "RANK_PROGRAM", f"{program}\n{RANK_PROGRAM}")
    for owner, name in (
        (ProcessGroup, "gather"),
        (ProcessGroup, "broadcast"),
        (communicator, "open_ranks"),
        (leader, "open_ranks"),
    ):
        patch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    patch.setattr(LocalRoundQueue, "write_traffic", None, raising=False)
    exec(program, {})
    numbers = count()

    def read_traffic(engine: Engine) -> dict[int, Any]:
        number = next(numbers)
        ranks = engine.plan.shape.tp
        leading = engine.round_queue
        leading.order(leading.queue.write_traffic, number)  # type: ignore[attr-defined]
        places = [folder / f"{rank}-{number}" for rank in range(ranks)]
        assert wait_until(
            lambda: all(place.exists() and place.read_text() for place in places), ENDS_WITHIN
        )
        return {rank: json.loads(place.read_text()) for rank, place in enumerate(places)}

    return read_traffic


def leader_of(engine: Engine) -> Any:
    return engine.round_queue.leader  # type: ignore[attr-defined]


def process_ids_of(engine: Engine) -> list[int]:
    return [process.pid for process in leader_of(engine)._processes.values()]


def has_ended(pid: int) -> bool:
    """True if a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition, counting checks and not seconds.

    Where a machine stops its programs, it stops this one too.
    """
    for _ in range(round(seconds / POLL_SECONDS)):
        if condition():
            return True
        time.sleep(POLL_SECONDS)
    return condition()


@contextmanager
def assert_nothing_is_left(engine: Engine) -> Iterator[None]:
    started = process_ids_of(engine)
    shared = shared_memory(process_ids_of(engine))
    yield
    assert wait_until(lambda: all(map(has_ended, started)), ENDS_WITHIN)
    assert not any(map(Path.exists, shared))


def children(pid: int) -> list[int]:
    child_ids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            child_ids += map(int, (task / "children").read_text().split())
    return child_ids


def shared_memory(processes: list[int]) -> set[Path]:
    """Return the files of shared memory that processes have open or mapped, if they still run."""
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
def record_peak_memory() -> Iterator[dict[int, int]]:
    """Yield the most private bytes of each process that this one starts meanwhile, by its id."""
    peak_bytes: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for pid in children(os.getpid()):
                with suppress(OSError, StopIteration):
                    if RANK_PROGRAM.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        continue  # still a copy of this process
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    anonymous_line = next(line for line in lines if line.startswith("RssAnon:"))
                    peak_bytes[pid] = max(
                        peak_bytes.get(pid, 0), 1024 * int(anonymous_line.split()[1])
                    )

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield peak_bytes
    finally:
        done.set()
        watch.join()

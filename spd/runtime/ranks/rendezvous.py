"""Where ranks that torchrun has started meet: its store, whose address the environment gives all of them.

Rank 0 leaves there, for each of its engines, where it listens. The key stands beside it: what can reach
the store is trusted, as by `torchrun` itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from spd.errors import EngineError

RENDEZVOUS_SECONDS = (
    60  # in which ranks that have said that they are there must have found each other
)
PAUSE = 0.2
END = "end"
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's rank, and how many ranks torchrun has started; None outside of it."""
    rank, world, *address = (environment.get(name, "") for name in NAMES)
    if not (rank.isdigit() and world.isdigit() and all(address)) or int(world) < 2:
        return None
    return int(rank), int(world)


def connect_store() -> Any:
    """The store. Raises EngineError where it does not answer."""
    from torch.distributed.rendezvous import rendezvous

    from spd.runtime.ranks.c10d import c10d

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_SECONDS)))
    except (RuntimeError, ValueError) as error:
        fix = ["torchrun with the same --master-addr and --master-port on every machine"]
        raise EngineError(
            "the ranks cannot meet", reason=str(error).splitlines()[:1], fix=fix
        ) from None
    return c10d.PrefixStore("spd", store)


def announce_engine(store: Any, told: Mapping[str, Any]) -> None:
    """Say where an engine's rank 0 listens."""
    store.set(f"crew {store.add('crews', 1)}", json.dumps(dict(told)))


def next_engine(store: Any, number: int) -> dict[str, Any] | None:
    """What was announced as crew `number`, from 1 on; None where it is not there yet, after a pause."""
    if not store.check([f"crew {number}"]):
        time.sleep(PAUSE)
        return None
    told: dict[str, Any] = json.loads(store.get(f"crew {number}"))
    return told

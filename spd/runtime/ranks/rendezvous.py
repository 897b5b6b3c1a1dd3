"""The store where ranks of torchrun meet; the environment gives its address to all of them.

Rank 0 leaves there, for each of its engines, the address where it listens, and the key with it:
whatever can reach the store is trusted, as by `torchrun` itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from spd.errors import EngineError

if TYPE_CHECKING:
    from spd.runtime.ranks.c10d import Store

RENDEZVOUS_SECONDS = 60
"""Seconds in which ranks that have reported to rank 0 must connect to each other."""
POLL_PAUSE_SECONDS = 0.2
END_KEY = "end"
"""The key that the leading rank writes to the store when its program has ended."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankSpec(TypedDict, total=False):
    """The JSON that starts a rank: where rank 0's engine listens, and the rank's own place."""

    host: str
    port: int
    key: str  # hex
    tp: int
    device: str
    rank: int
    leader: int  # the process of rank 0, where that starts the rank
    stderr: int  # a descriptor of rank 0's standard error
    lines: list[int]  # inherited descriptors: the connection to rank 0, and the store's file


def torchrun_rank(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return this process's rank and how many ranks torchrun has started; None outside of torchrun.

    environment: the process's environment variables.
    """
    rank, world_size, *address = (environment.get(name, "") for name in TORCHRUN_VARIABLES)
    if not (rank.isdigit() and world_size.isdigit() and all(address)) or int(world_size) < 2:
        return None
    return int(rank), int(world_size)


def connect_torchrun_store() -> Store:
    """Connect to torchrun's store, whose address is in the environment variables, and return it.

    Raises EngineError where it does not answer.
    """
    from datetime import timedelta

    from torch.distributed.rendezvous import rendezvous

    from spd.runtime.ranks.c10d import c10d

    try:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_SECONDS)))
    except (RuntimeError, ValueError) as error:
        fix = ["torchrun with the same --master-addr and --master-port on every machine"]
        raise EngineError(
            "the ranks cannot meet", reason=str(error).splitlines()[:1], fix=fix
        ) from None
    prefix_store: Store = c10d.PrefixStore("spd", store)
    return prefix_store


def announce_engine(store: Store, address: RankSpec) -> None:
    """Write the address where an engine's rank 0 listens to the store, under the next number."""
    store.set(f"crew {store.add('crews', 1)}", json.dumps(address))


def next_engine(store: Store, number: int) -> RankSpec | None:
    """Read the address of engine `number`, from 1 on; before it exists, sleep and return None."""
    if not store.check([f"crew {number}"]):
        time.sleep(POLL_PAUSE_SECONDS)
        return None
    address: RankSpec = json.loads(store.get(f"crew {number}"))
    return address

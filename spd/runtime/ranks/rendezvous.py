"""Where ranks that torchrun has started meet: a store that all of them know the address of.

Rank 0 leaves there, for each of its engines, where it listens. The key stands beside it: what can reach
the store is trusted, as by `torchrun` itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from spd.errors import EngineError, UsageError

MEETING_SECONDS = 60
"""In which ranks that have said that they are there must have found each other."""
PAUSE = 0.2
END = "end"
FORM = "HOST:PORT/RANKS/ATTEMPT"


@dataclass(frozen=True)
class Rendezvous:
    """A store's address, how many ranks there are, and which attempt of starting them this is."""

    host: str
    port: int
    world: int
    attempt: str

    @classmethod
    def parse(cls, text: str) -> Rendezvous:
        """From HOST:PORT/RANKS/ATTEMPT. Raises UsageError."""
        address, _, rest = text.partition("/")
        host, _, port = address.rpartition(":")
        world, _, attempt = rest.partition("/")
        if not host or not port.isdigit() or not world.isdigit():
            raise UsageError(f"--rendezvous {text} is not {FORM}", fix=["leave it to torchrun"])
        return cls(host.strip("[]"), int(port), int(world), attempt)

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> tuple[int, Rendezvous] | None:
        """This process's rank and where it meets the others, as torchrun says it; None outside of it."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        rank, world, host, port = (environment[name] for name in names)
        if not (rank.isdigit() and world.isdigit() and port.isdigit()) or int(world) < 2:
            return None
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(rank), cls(host, int(port), int(world), attempt)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.world}/{self.attempt}"

    def open(self) -> Any:
        """The store. Raises EngineError where it does not answer."""
        from spd.runtime.ranks.communicator import c10d

        try:
            store = c10d.TCPStore(
                self.host, self.port, None, False, timedelta(seconds=MEETING_SECONDS), wait_for_workers=False
            )
        except RuntimeError as error:
            raise EngineError(
                f"the ranks cannot meet at {self.host}:{self.port}",
                reason=[str(error).splitlines()[0]],
                fix=["torchrun with the same --master-addr and --master-port on every machine"],
            ) from None
        return c10d.PrefixStore(f"spd {self.attempt}", store)

    def announce(self, store: Any, told: Mapping[str, Any]) -> None:
        """Say where an engine's rank 0 listens."""
        number = store.add("crews", 1)
        store.set(f"crew {number}", json.dumps(dict(told)))

    def next_crew(self, store: Any, number: int) -> dict[str, Any] | None:
        """What was announced as crew `number`, from 1 on; None where it is not there yet, after a pause."""
        if not store.check([f"crew {number}"]):
            time.sleep(PAUSE)
            return None
        told: dict[str, Any] = json.loads(store.get(f"crew {number}"))
        return told

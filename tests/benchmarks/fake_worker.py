"""A worker that needs no engine: tokens count up from the prompt's sum; started by test_peers_cpu."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.protocol import ChunkClock, Generation, WorkerOptions, serve

MODE = sys.argv.pop(1)


class FakeEngine:
    """Speaks the protocol; MODE says how it misbehaves."""

    def __init__(self, options: WorkerOptions) -> None:
        print("an engine's own chatter", flush=True)
        self.threads = options.threads
        if MODE == "no-load":
            raise RuntimeError("cannot load this")

    def versions(self) -> Mapping[str, str]:
        """Return one made-up version."""
        return {"fake": "1.0", "cpus": str(len(os.sched_getaffinity(0)))}

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Give two tokens a step and one at last, 5 ms a step."""
        if MODE == "dies" and tokens > 16:
            os._exit(3)
        if MODE == "raises" and tokens > 16:
            raise RuntimeError("lost the thread")
        print("chatter again", flush=True)
        clock = ChunkClock()
        start = sum(prompt_ids)
        clock.add([start])
        while len(clock.token_ids) < tokens - (MODE == "short" and tokens > 16):
            time.sleep(0.005)
            at = len(clock.token_ids)
            wrong = 1 if MODE == "differs" and at > 10 else 0
            clock.add([start + at + i + wrong for i in range(min(2, tokens - at))])
        return clock.finish(verify_ms_1=2.0, verify_ms_rows=2.2)


if __name__ == "__main__":
    raise SystemExit(serve(FakeEngine))

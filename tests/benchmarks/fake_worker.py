"""A worker that needs no engine: tokens count up from the prompt's sum; started by test_peers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import protocol

MODE = sys.argv.pop(1)


class FakeEngine:
    """An engine that speaks the protocol; MODE names its misbehaviour."""

    def __init__(self, options: protocol.WorkerOptions) -> None:
        print("an engine's own chatter", flush=True)
        self.threads = options.threads

    def versions(self) -> Mapping[str, str]:
        """Return one made-up version."""
        return {"fake": "1.0", "cpus": str(len(os.sched_getaffinity(0)))}

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> protocol.Generation:
        """Give two tokens a step and one at last, 5 ms a step."""
        if MODE == "dies" and tokens > 16:
            os._exit(3)
        print("chatter again", flush=True)
        clock = protocol.ChunkClock()
        start = sum(prompt_ids)
        clock.add([start])
        while len(clock.token_ids) < tokens - (MODE == "short" and tokens > 16):
            time.sleep(0.005)
            at = len(clock.token_ids)
            wrong = 1 if (MODE == "differs" and at > 10) or MODE == "lies" else 0
            clock.add([start + at + i + wrong for i in range(min(2, tokens - at))])
        counted = {"drafts": 100, "draft_tokens": 200, "accepted": 75, "per_position": [50, 25]}
        if MODE == "lucky":
            counted |= {"accepted": 81, "per_position": [53, 28]}
        return clock.finish(verify_ms_1=2.0, verify_ms_rows=2.2, speculation=counted)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        concurrency: int,
        arrivals: list[float] | None,
    ) -> protocol.PassResult:
        """Run all requests at once, in two steps of 5 ms."""
        assert arrivals is None or len(arrivals) == len(prompts)
        requests = []
        for prompt in prompts:
            ids = [sum(prompt) + i for i in range(tokens)]
            chunks = [protocol.Chunk(0.005, 1), protocol.Chunk(0.01, tokens - 1)]
            requests.append(protocol.Generation(ids, chunks, {}))
        time.sleep(0.01)
        return protocol.PassResult(0.01, requests, protocol.Speculation(100, 200, 75, (50, 25)))


if __name__ == "__main__":
    raise SystemExit(protocol.serve(FakeEngine))

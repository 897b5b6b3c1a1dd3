"""The worker side of a peer benchmark: JSON lines on stdin and stdout, one object a line.

Owns the loop and the words, so that every engine is timed alike. A worker answers {"op":
"generate"} with token ids and the arrival time of every chunk, and {"op": "pass"} with the same for
many requests that run together; what the engine itself prints goes to stderr, where it cannot spoil
the lines.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

NGRAM_MIN = 3
NGRAM_MAX = 8
"""Matches that lookup tries in every engine that takes both; transformers takes the longest only."""


@dataclass(frozen=True)
class WorkerOptions:
    """The options on every worker's command line."""

    model: Path
    draft: Path | None
    draft_max: int
    threads: int
    dtype: str
    ctx: int
    ngram: bool
    mtp: bool
    eagle3: Path | None
    slots: int
    imposed: float | None
    build: Path | None
    int4: bool
    activations: str
    instructions: str | None


@dataclass(frozen=True)
class Chunk:
    """Tokens that arrived together, and when: seconds since the request was handed over."""

    seconds: float
    tokens: int


@dataclass(frozen=True)
class Speculation:
    """vLLM's counters: rounds that had drafts, drafts, accepted ones, and those by position."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    def since(self, before: Speculation) -> Speculation:
        """Return the counts after `before`."""
        earlier = (*before.per_position, *[0] * len(self.per_position))
        return Speculation(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            tuple(now - then for now, then in zip(self.per_position, earlier, strict=False)),
        )


@dataclass(frozen=True)
class Generation:
    """One finished request; chunks are timed from its arrival."""

    token_ids: list[int]
    chunks: list[Chunk]
    extra: dict[str, Any]


@dataclass(frozen=True)
class PassResult:
    """Requests that ran together; None where the engine counts no drafts."""

    seconds: float
    requests: list[Generation]
    speculation: Speculation | None


class PeerEngine(Protocol):
    """The interface of a worker once it is loaded."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions that matter, by package."""
        ...

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate exactly `tokens` tokens greedily, ignoring end tokens."""
        ...


class PassEngine(PeerEngine, Protocol):
    """A worker that also runs several requests together."""

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        concurrency: int,
        arrivals: list[float] | None,
    ) -> PassResult:
        """Run requests `concurrency` at a time, or each at its second in `arrivals`."""
        ...


class ChunkClock:
    """Collect the chunks of one request; the clock starts when it is made."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.chunks: list[Chunk] = []
        self.start = time.perf_counter()

    def add(self, token_ids: Sequence[int]) -> None:
        """Record tokens that have just arrived; an empty arrival is no chunk."""
        if token_ids:
            self.chunks.append(Chunk(time.perf_counter() - self.start, len(token_ids)))
            self.token_ids += token_ids

    def finish(self, **extra: Any) -> Generation:
        """Close the request."""
        return Generation(self.token_ids, self.chunks, extra)


def imposed_rates(length: float, k: int) -> list[float]:
    """Return the chances of 1, 2, … k accepted drafts where spd would impose `length`."""
    from spd.runtime.round.imposed_acceptance import conditional_rate

    rate = conditional_rate(length, k)
    return [rate**position for position in range(1, k + 1)]


def parse_options(arguments: Sequence[str] | None = None) -> WorkerOptions:
    """Read the command line that `entries.py` writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--ngram", action="store_true", help="look drafts up in the text itself")
    parser.add_argument(
        "--mtp", action="store_true", help="draft with the checkpoint's own MTP layers"
    )
    parser.add_argument("--eagle3", type=Path, help="draft with an EAGLE-3 head")
    parser.add_argument("--slots", type=int, default=1, help="requests that run together at most")
    parser.add_argument(
        "--imposed", type=float, metavar="LENGTH", help="impose an acceptance length"
    )
    parser.add_argument("--build", type=Path, help="folder of a peer that was built here")
    parser.add_argument(
        "--int4", action="store_true", help="with weights in four bits, made at load"
    )
    parser.add_argument("--activations", default="whole", help="of spd: whole or int8")
    parser.add_argument(
        "--instructions", metavar="NAME", help="of spd's kernels, such as AVX2; the best otherwise"
    )
    return WorkerOptions(**vars(parser.parse_args(arguments)))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even while it is stopped (Linux)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _answer(engine: PeerEngine, request: Mapping[str, Any]) -> Generation | PassResult:
    if request["op"] == "generate":
        return engine.generate(request["prompt_ids"], request["tokens"], **request.get("extra", {}))
    together = cast(PassEngine, engine)
    return together.run(
        request["prompts"], request["tokens"], request["concurrency"], request["arrivals"]
    )


def serve(load: Callable[[WorkerOptions], PeerEngine]) -> int:
    """Load the engine, say so, then answer one line at a time until stdin ends or "quit" comes.

    A failure is answered as {"error": traceback}; one while loading ends the process with status 1.
    """
    die_with_parent()
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(value: Mapping[str, Any]) -> None:
        lines.write(json.dumps(value) + "\n")
        lines.flush()

    try:
        started = time.perf_counter()
        engine = load(parse_options())
        loaded = time.perf_counter() - started
        say({"ready": True, "load_seconds": loaded, "versions": dict(engine.versions())})
    except Exception:
        say({"error": traceback.format_exc()})
        return 1
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "quit":
            break
        try:
            say(asdict(_answer(engine, request)))
        except Exception:
            say({"error": traceback.format_exc()})
    return 0

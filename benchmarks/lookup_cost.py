"""What lookup costs a round, by the length of the text and of the pool that it looks up in.

    python -m benchmarks.lookup_cost [MODEL] [--tokens 1k,4k,16k,64k,128k] [--rounds 101] [--out FILE]

MODEL is "demo" or a folder; its weights are random, for time does not depend on them. Texts are
random, too, so that each search goes through all of its text, and nothing is drafted. A round
without lookup that verifies one row, which is the cheapest there is, runs at a context of as many
tokens. The C functions that lookup adds to a recorded round are called alone, on the state of such
a request and with a pool of as many tokens. Printed are medians, each function's share of the
round, and what adding a text of 1,000 tokens to that pool takes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.parser import parse_token_count
from spd.formats.demo import DEMOS, demo_folder
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.recording import POOL_BYTES, record
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.proposers.ngram import NgramLookup
from spd.runtime.round.limits import PAGE_SIZE
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.round_queue import SlotAdmission
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps

SCHEMA = "spd.benchmarks.lookup_cost/1"
DRAFTS = 8
CALLS = 301
WARM_UP = 5
FIRST_PAGE = 2
ADDED_TOKENS = 1000


class Prepared:
    """An engine whose only slot has a text of random tokens, as if its cache were written."""

    def __init__(self, model: Path, tokens: int, rounds: int, vocab: int, **options: Any) -> None:
        ctx = tokens + rounds + DRAFTS + 2
        config = EngineConfig(
            model=model, load="dummy", ctx=ctx, threads=1, kernels="native", **options
        )
        self.engine = Engine(config)
        draw = random.Random(0)
        self.text = [draw.randrange(vocab) for _ in range(tokens)]
        self.other_text = [draw.randrange(vocab) for _ in range(tokens)]
        pages = [*range(FIRST_PAGE, FIRST_PAGE + -(-ctx // PAGE_SIZE))]
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        admission = SlotAdmission(
            slot=0,
            tokens=self.text,
            prompt_length=tokens,
            params=params,
            draft_max=None,
            length_limit=ctx,
            stop_ids=(),
            prefilled=tokens - 1,
            pages=pages,
            snapshot=None,
        )
        self.queue = self.engine.round_queue
        self.queue.admit(admission)
        self.queue.set_active(0, True)
        self.views = [SlotView(ctx, pages)]
        self.needs = SamplingSteps.from_params(params)

    def round_seconds(self) -> float:
        """Run a round that verifies one row; return its seconds."""
        result = self.queue.launch(0, self.views, self.needs, None, 0).read()
        return sum(result.seconds)

    def lookups(self) -> dict[str, Callable[[], None]]:
        """Return the searches that lookup adds to a round, by name, as a recorded round runs them."""
        queue = self.queue
        assert isinstance(queue, LocalRoundQueue)
        native = queue.round.kernels.native
        lookup = queue.round.lookup
        assert isinstance(native, NativeKernels) and isinstance(lookup, NgramLookup)
        assert lookup.pool is not None
        state = queue.state
        shortest = lookup.shortest
        longest = lookup.longest
        texts = lookup.pool.texts
        own_text = partial(
            native.ngram_lookup, state, DRAFTS, shortest, longest, bound=state.max_len
        )
        pool = partial(native.pool_lookup, state, texts, DRAFTS, shortest, longest)
        memory = torch.zeros(POOL_BYTES, dtype=torch.uint8)
        return {
            "own text": record(own_text, native, memory)[0],
            "pool": record(pool, native, memory)[0],
        }


def call_seconds(call: Callable[[], None]) -> float:
    """Return the median of a call's seconds."""
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(model: Path, tokens: int, rounds: int, vocab: int) -> dict[str, Any]:
    """Return the medians at one length, in microseconds."""
    plain = Prepared(model, tokens, rounds + WARM_UP, vocab, spec="off")
    seconds = [plain.round_seconds() for _ in range(rounds + WARM_UP)][WARM_UP:]
    round_seconds = statistics.median(seconds)
    with_pool = Prepared(
        model, tokens, rounds, vocab, spec="ngram", draft_max=DRAFTS, pool_tokens=tokens
    )
    with_pool.queue.remember_text(with_pool.other_text)
    row: dict[str, Any] = {"tokens": tokens, "round µs": round(1e6 * round_seconds, 1)}
    for name, search in with_pool.lookups().items():
        added = call_seconds(search)
        row |= {
            f"{name} µs": round(1e6 * added, 2),
            f"{name} share": round(added / round_seconds, 5),
        }
    added_text = with_pool.text[:ADDED_TOKENS]
    row["added text µs"] = round(
        1e6 * call_seconds(partial(with_pool.queue.remember_text, added_text)), 1
    )
    return row


def long_model(name: str, folder: Path, most: int) -> tuple[Path, int]:
    """Return a copy of a model whose context is long enough, and its number of token ids."""
    source = demo_folder(name) if name in DEMOS else Path(name)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], most)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config["vocab_size"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", default="1k,4k,16k,64k,128k")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    lengths = [parse_token_count(length) for length in arguments.tokens.split(",")]
    with tempfile.TemporaryDirectory() as place:
        limit = 2 * max(lengths)
        model, vocab = long_model(arguments.model, Path(place), limit)
        rows = [measure(model, tokens, arguments.rounds, vocab) for tokens in lengths]
    result = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        **describe_commit("spd", "benchmarks/lookup_cost.py"),
        "model": arguments.model,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text) if arguments.out is None else arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""What lookup costs a round, by the length of the text and of the pool that it looks up in.

    python -m benchmarks.lookup_cost [MODEL] [--tokens 1k,4k,16k,64k,128k] [--rounds 101] [--out FILE]

MODEL is "demo" or a folder; its weights are random, for time does not depend on them. Texts are
random, too, so that each search goes through all of its text, and nothing is drafted: a round
verifies one row, which is the cheapest there is. A round without lookup, one with the request's
own text and one with a pool of as many tokens beside it run by turns, at the same context. Printed
are their medians, and what lookup adds as a share of the round without it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.parser import parse_size
from spd.formats.demo import DEMOS, demo_folder
from spd.runtime import Engine, EngineConfig, SamplingParams
from spd.runtime.round.limits import PAGE_SIZE
from spd.runtime.round.round_queue import SlotAdmission
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps

SCHEMA = "spd.benchmarks.lookup_cost/1"
DRAFTS = 8
WARM_UP = 5
FIRST_PAGE = 2
MODES = ("off", "own text", "pool")


class Rounds:
    """Rounds of one request at a context, with lookup or without."""

    def __init__(self, model: Path, mode: str, tokens: int, rounds: int, vocab: int) -> None:
        ctx = tokens + rounds + DRAFTS + 2
        pool = tokens if mode == "pool" else 0
        config = EngineConfig(
            model=model,
            spec="off" if mode == "off" else "ngram",
            draft_max=None if mode == "off" else DRAFTS,
            adaptive=None if mode == "off" else False,
            load="dummy",
            ctx=ctx,
            pool_tokens=pool,
        )
        self.engine = Engine(config)
        self.queue = self.engine.round_queue
        self.drafts = 0 if mode == "off" else DRAFTS
        draw = random.Random(0)
        text = [draw.randrange(vocab) for _ in range(tokens)]
        if pool:
            self.queue.remember([draw.randrange(vocab) for _ in range(pool)])
        pages = [*range(FIRST_PAGE, FIRST_PAGE + -(-ctx // PAGE_SIZE))]
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        admission = SlotAdmission(
            slot=0,
            tokens=text,
            prompt_length=tokens,
            params=params,
            draft_max=None,
            length_limit=ctx,
            stop_ids=(),
            prefilled=tokens - 1,
            pages=pages,
            snapshot=None,
        )
        self.queue.admit(admission)
        self.queue.set_active(0, True)
        self.views = [SlotView(ctx, pages)]
        self.needs = SamplingSteps.from_params(params)

    def run(self) -> float:
        """Run a round that verifies one row; return its seconds."""
        result = self.queue.launch(0, self.views, self.needs, None, self.drafts).read()
        return sum(result.seconds)


def measure(model: Path, tokens: int, rounds: int, vocab: int) -> dict[str, Any]:
    """Return the medians of rounds in all modes at one length, in microseconds."""
    runs = {mode: Rounds(model, mode, tokens, rounds + WARM_UP, vocab) for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(rounds + WARM_UP):
        for mode, run in runs.items():
            seconds[mode].append(run.run())
    medians = {mode: statistics.median(values[WARM_UP:]) for mode, values in seconds.items()}
    row: dict[str, Any] = {"tokens": tokens}
    row |= {f"{mode} µs": round(1e6 * value, 1) for mode, value in medians.items()}
    for mode, less in (("own text", "off"), ("pool", "own text")):
        added = [a - b for a, b in zip(seconds[mode], seconds[less], strict=True)][WARM_UP:]
        row[f"{mode} adds µs"] = round(1e6 * statistics.median(added), 1)
        row[f"{mode} adds"] = round(statistics.median(added) / medians["off"], 4)
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
    lengths = [parse_size(length) for length in arguments.tokens.split(",")]
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

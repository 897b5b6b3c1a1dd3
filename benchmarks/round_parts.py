"""Where the time of a round and of a prompt goes on a CPU, beside what its bytes and products take.

    python -m benchmarks.round_parts MODEL... [--forms stored,bf16,int8,int4] [--instructions AVX2,...]
                                     [--rows 1,4,8,16] [--prompts 512,2048] [--rounds 24] [--out FILE]

A model is a folder, a GGUF file, or `1.5B`: random weights of that shape. `stored` leaves weights as
they are. A line is a round of one request that verifies so many rows, or a prompt. Its parts are
milliseconds by the wall, each the median of all rounds; numbers of rows take turns. `head` is the
product that gives logits, `products` are the others. `calls` is what stands between C functions in a
round: torch's operations and Python; `host` is what the engine does around it. `read` is the time of
the weights' bytes at the rate of a plain reader with as many threads, `multiply` that of the products
at the rate of independent instructions (vdpbf16ps or FMA) of all threads, both measured in the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cpu_attention import read_rate
from benchmarks.cpu_products import multiply_rates
from benchmarks.environment import describe_commit, describe_machine
from spd.formats.folder import ModelFolder
from spd.kernels.native import build
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import ROUNDED, Epilogue, PackedWeight
from spd.kernels.native.products import NativeProducts
from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from spd.runtime.round.local_queue import LocalPendingRound, LocalRoundQueue
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampling_params import SamplingSteps
from spd.runtime.round.state import RoundState

SCHEMA = "spd.benchmarks.round_parts/1"
FORMS: dict[str, dict[str, Any]] = {
    "stored": {},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "int4": {"dtype": "bfloat16", "quantize": "int4"},
}
PARTS = {"attend": "attention", "rotary_store": "attention", "latent_store": "attention"}
"""The part of a C function; `linear` and `experts` are products, others are `other`."""
SHAPE_1_5B: dict[str, Any] = {
    "hidden": 1536,
    "heads": 12,
    "kv_heads": 2,
    "head_dim": 128,
    "intermediate": 8960,
    "vocab": 151936,
}
PROMPT_TOKENS = 24
"""Tokens of the prompt before the rounds."""


@dataclass
class Line:
    """One line of the table: milliseconds by part."""

    model: str
    form: str
    instructions: str
    label: str
    """The rows of a round, or the tokens of a prompt."""
    total: float
    parts: dict[str, float]
    read: float
    multiply: float


class Clock:
    """Collects the seconds of C functions by part, and the work of products."""

    def __init__(self, vocab: int) -> None:
        """vocab: the width of the product that gives logits."""
        self.vocab = vocab
        self.seconds = defaultdict[str, float](float)
        self.read_bytes = 0
        self.products = 0
        self._weight: PackedWeight | None = None
        """The weight of the product that is being called or recorded."""
        self._rows = 0

    def begin(self) -> None:
        """Forget what was collected."""
        self.seconds.clear()
        self.read_bytes = 0
        self.products = 0

    @contextmanager
    def collecting(self, native: NativeKernels) -> Iterator[None]:
        """Time the C functions that kernels call or record meanwhile."""
        multiply = NativeProducts.packed_linear

        def packed_linear(
            native: NativeKernels,
            x: Tensor,
            weight: PackedWeight,
            bias: Tensor | None,
            epilogue: Epilogue = ROUNDED,
            **options: Any,
        ) -> Tensor:
            self._weight = weight
            self._rows = x.shape[0]
            return multiply(native, x, weight, bias, epilogue, **options)

        with (
            mock.patch.object(NativeProducts, "packed_linear", packed_linear),
            mock.patch.object(native, "library", TimedLibrary(self, native.library)),
        ):
            yield

    def timed(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        """Return a C function that counts its time and work when it runs."""
        part = PARTS.get(name, "other")
        read_bytes = products = 0
        weight = self._weight
        if name == "linear" and weight is not None:
            pieces = (weight, *weight.further_pieces)
            self._weight = None  # a later piece of the same product counts its time alone
            part = "head" if weight.rows == self.vocab else "products"
            products = self._rows * weight.depth * weight.rows * weight.count
            read_bytes = sum(
                tensor.nbytes
                for piece in pieces
                for tensor in (piece.tiles, *piece.quant_parameters.values())
            )

        def run(*arguments: Any) -> None:
            """Call the function, and add what it took."""
            began = time.perf_counter()
            function(*arguments)
            self.seconds[part] += time.perf_counter() - began
            self.read_bytes += read_bytes
            self.products += products

        return run


class TimedLibrary:
    """A library whose C functions count their time."""

    def __init__(self, clock: Clock, library: Any) -> None:
        self.clock = clock
        self.library = library

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self.clock.timed(name.removeprefix("spd_"), getattr(self.library, name))


def fixed_drafts(state: RoundState, k: int, model_drafts: int, views: object) -> None:
    """Draft the same tokens in every round, as lookup would; nearly none is accepted."""
    state.draft[:, :k] = 5
    state.num_drafts.fill_(k)


def open_engine(model: Path, form: str, rows: int, ctx: int, threads: int) -> Engine:
    """Return an engine whose rounds have up to so many rows."""
    drafts: dict[str, Any] = (
        {"spec": "ngram", "draft_max": rows - 1} if rows > 1 else {"spec": "off"}
    )
    config = EngineConfig(
        model=model,
        slots=1,
        ctx=ctx,
        threads=threads,
        prefix_sharing=False,
        **drafts,
        **FORMS[form],
    )
    engine = Engine(config)
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    if rows > 1:
        lookup = SimpleNamespace(draft=fixed_drafts, may_draft_more=False)
        mock.patch.object(queue.round, "lookup", lookup).start()
    return engine


class Measurement:
    """Measures rounds and prompts of one engine."""

    def __init__(self, engine: Engine) -> None:
        queue = engine.round_queue
        assert isinstance(queue, LocalRoundQueue)
        assert isinstance(queue.runner.kernels, NativeKernels)
        self.engine = engine
        self.queue = queue
        self.native = queue.runner.kernels
        self.vocab = engine.plan.model.config.vocab_size
        self.clock = Clock(self.vocab)
        self.samples = defaultdict[str, list[tuple[dict[str, float], int, int]]](list)
        """Milliseconds by part, bytes and products of every round or prompt, by label."""

    def add(self, label: str, round_seconds: float, total: float) -> None:
        """Add a round or prompt that took so many seconds, of which the device program took some."""
        seconds = dict(self.clock.seconds)
        seconds["calls"] = round_seconds - sum(seconds.values())
        seconds["host"] = total - round_seconds
        seconds["total"] = total
        parts = {part: 1000 * value for part, value in seconds.items()}
        self.samples[label].append((parts, self.clock.read_bytes, self.clock.products))

    def run_rounds(self, row_counts: Sequence[int], rounds: int) -> None:
        """Run rounds of each number of rows in turn, after some that are recorded."""
        engine = self.engine
        warm_up = 3 * len(row_counts)
        count = warm_up + rounds * len(row_counts)
        turns = islice(cycle(row_counts), count + 3 * len(row_counts))
        lengths = iter([rows - 1 for rows in turns])
        launch = self.queue.launch
        spent = [0.0]

        def timed_launch(
            k: int,
            views: Sequence[SlotView],
            needs: SamplingSteps,
            num_logprobs: int | None,
            next_k: int,
            chained: int,
        ) -> LocalPendingRound:
            began = time.perf_counter()
            pending = launch(k, views, needs, num_logprobs, next_k, chained)
            spent[0] = time.perf_counter() - began
            return pending

        tokens = tuple(i * 7919 % self.vocab for i in range(300, 300 + PROMPT_TOKENS))
        params = SamplingParams(max_tokens=count + 64, ignore_eos=True)
        engine.add(Request("rounds", tokens, params))
        with (
            self.clock.collecting(self.native),
            mock.patch.object(engine.draft_length, "choose_k", lambda: next(lengths)),
            mock.patch.object(self.queue, "launch", timed_launch),
        ):
            while not engine.step():
                pass
            for number in range(count):
                rows = engine._k + 1
                self.clock.begin()
                began = time.perf_counter()
                engine.step()
                total = time.perf_counter() - began
                if number >= warm_up:
                    self.add(f"{rows} row{'s' * (rows > 1)}", spent[0], total)
        engine.abort("rounds")
        while engine.step():
            pass

    def run_prompt(self, length: int) -> None:
        """Run a prompt of so many tokens and its first round."""
        tokens = tuple(i * 7919 % self.vocab for i in range(300, 300 + length))
        self.engine.add(Request(f"prompt {length}", tokens, SamplingParams(max_tokens=1)))
        with self.clock.collecting(self.native):
            self.clock.begin()
            began = time.perf_counter()
            while not any(event.finish_reason for event in self.engine.step()):
                pass
            total = time.perf_counter() - began
        self.add(f"prompt {length}", total, total)

    def lines(self, model: str, form: str, read: float, multiply: float) -> list[Line]:
        """Return a line for each number of rows and prompt. read, multiply: rates a second."""
        lines = []
        for label, samples in self.samples.items():
            names = sorted({name for parts, _, _ in samples for name in parts})
            medians = {
                name: statistics.median(parts.get(name, 0.0) for parts, _, _ in samples)
                for name in names
            }
            _, read_bytes, products = samples[-1]
            lines.append(
                Line(
                    model=model,
                    form=form,
                    instructions=str(build.instructions()),
                    label=label,
                    total=medians.pop("total"),
                    parts=medians,
                    read=1000 * read_bytes / read,
                    multiply=1000 * products / multiply,
                )
            )
        return lines


COLUMNS = ("products", "head", "attention", "other", "calls", "host")


def print_line(line: Line) -> None:
    """Print a line of the table."""
    parts = [f"{line.parts.get(name, 0.0):.2f}" for name in COLUMNS]
    work = line.parts.get("products", 0.0) + line.parts.get("head", 0.0)
    share = max(line.read, line.multiply) / work
    cells = [
        line.model,
        line.form,
        line.instructions,
        line.label,
        f"{line.total:.2f}",
        *parts,
        f"{line.read:.2f}",
        f"{line.multiply:.2f}",
        f"{share:.2f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["stored"])
    parser.add_argument("--instructions", type=lambda text: text.split(","), default=None)
    parser.add_argument("--rows", default="1,4,8,16")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(word) for word in text.split(",") if word]


def model_folders(names: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Return the models by name; `1.5B` is written to a folder."""
    from tests.recipes.medium import write_medium

    models = {}
    for name in names:
        if name == "1.5B":
            models[name] = write_medium(scratch / "1.5B", **SHAPE_1_5B)
        else:
            folder = ModelFolder.resolve(name)
            models[folder.path.name] = folder.path
    return models


def main() -> None:
    """Measure; print a table in Markdown, and write it to a file."""
    options = parse()
    row_counts = numbers(options.rows)
    prompts = numbers(options.prompts)
    torch.set_num_threads(options.threads)
    here = options.instructions or [build.instructions()]
    lines: list[Line] = []
    columns = " | ".join(("model", "weights", "instructions", "what", "total", *COLUMNS))
    print(f"| {columns} | read | multiply | of bound |")
    print(f"|---|---|---|---|{'--:|' * (len(COLUMNS) + 4)}")
    with tempfile.TemporaryDirectory() as scratch:
        models = model_folders(options.models, Path(scratch))
        for instructions in here:
            features = {*build.FEATURES[instructions]}
            with mock.patch.object(build, "processor_features", lambda: features):  # noqa: B023
                multiply = multiply_rates(instructions)["whole"] * options.threads
                for name, model in models.items():
                    for form in options.forms:
                        read = read_rate(20, options.threads)
                        ctx = max([*prompts, 512]) + 512
                        engine = open_engine(model, form, max(row_counts), ctx, options.threads)
                        measurement = Measurement(engine)
                        measurement.run_rounds(row_counts, options.rounds)
                        for length in prompts * 2:
                            measurement.run_prompt(length)
                        engine.close()
                        for line in measurement.lines(name, form, read, multiply):
                            lines.append(line)
                            print_line(line)
    if options.out:
        head = {"schema": SCHEMA, **describe_commit(), "machine": describe_machine()}
        table = [asdict(line) for line in lines]
        options.out.write_text(json.dumps({**head, "lines": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()

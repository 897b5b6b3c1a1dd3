"""The command line of `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import ROOT
from spd.kernels.native.build import FEATURES
from spd.runtime.lab.load import Load

RATE_SLOTS = 16
"""Requests that may run together where they come at a rate."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    model: Path
    draft: Path
    draft_max: int
    dtype: str
    tokens: int
    prompt_tokens: int
    rounds: int
    rows: int
    threads: int
    cpus: tuple[int, ...]
    ctx: int
    pythons: Mapping[str, str]
    only: tuple[str, ...]
    preload: str | None
    pause: float
    llama_cpp: Path | None
    imposed: float | None
    mtp: bool
    int4: bool
    eagle3: Path | None
    text: bool
    loads: tuple[Load, ...]
    load_tokens: int
    load_rounds: int
    activations: str
    instructions: str | None
    out: Path

    @property
    def slots(self) -> int:
        """Return the most requests that run together."""
        return max([1, *(load.concurrency for load in self.loads)])


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line; peers without a Python are left out."""
    parser = argparse.ArgumentParser(description="Compare spd with its peers on a CPU.")
    parser.add_argument(
        "model", type=Path, help="checkpoint folder, e.g. of tests/recipes/medium.py"
    )
    parser.add_argument("--draft", type=Path, help="draft folder (MODEL/draft)")
    parser.add_argument("--draft-max", type=int, default=4, metavar="K")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows", type=int, default=8, help="rows of the verify/decode ratio; 0 leaves it out"
    )
    parser.add_argument("--threads", type=int, help="all the CPUs of this process unless given")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--spd-python", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--transformers-python", metavar="PYTHON")
    parser.add_argument("--vllm-python", metavar="PYTHON")
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="DIR",
        help="llama.cpp's source, with llama-server in build/bin",
    )
    parser.add_argument(
        "--imposed",
        type=float,
        metavar="LENGTH",
        help="also with drafts at an imposed acceptance length, where a peer can",
    )
    parser.add_argument(
        "--mtp", action="store_true", help="also with MTP layers of MODEL, where a peer can"
    )
    parser.add_argument(
        "--eagle3", type=Path, metavar="HEAD", help="also with an EAGLE-3 head made for MODEL"
    )
    parser.add_argument(
        "--int4", action="store_true", help="also in four bits; llama.cpp's are Q4_0"
    )
    parser.add_argument(
        "--text", action="store_true", help="spd's own prompts instead of random ids"
    )
    parser.add_argument(
        "--concurrency", default="", metavar="LIST", help="requests together, e.g. 4,16"
    )
    parser.add_argument(
        "--rates", default="", metavar="LIST", help="requests a second, e.g. 1,2,4,6,8"
    )
    parser.add_argument("--load-tokens", type=int, default=32, help="of each request of a load")
    parser.add_argument("--load-rounds", type=int, default=3)
    parser.add_argument("--activations", default="whole", help="of spd: whole or int8")
    parser.add_argument(
        "--instructions", choices=[*FEATURES], help="of spd's kernels; the best unless given"
    )
    parser.add_argument("--only", help="comma list of entries, such as spd-plain,vllm-plain")
    parser.add_argument(
        "--vllm-preload", help="colon list of libraries (Intel OpenMP and tcmalloc if found)"
    )
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two runs")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_peers.json"
    )
    values = parser.parse_args(arguments)
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    threads = values.threads or len(cpus)
    if not 1 <= threads <= len(cpus):
        parser.error(f"--threads {threads}: this process may use {len(cpus)} CPUs")
    pythons = {
        "spd": values.spd_python,
        "transformers": values.transformers_python,
        "vllm": values.vllm_python,
    }
    if values.llama_cpp is not None:
        pythons["llama"] = values.spd_python
    only = tuple(values.only.split(",")) if values.only else ()
    return Options(
        model=values.model.resolve(),
        draft=(values.draft or values.model / "draft").resolve(),
        draft_max=values.draft_max,
        dtype=values.dtype,
        tokens=values.tokens,
        prompt_tokens=values.prompt_tokens,
        rounds=values.rounds,
        rows=values.rows,
        threads=threads,
        cpus=cpus[:threads],
        ctx=values.ctx,
        # Absolute but not resolved: a virtual environment's python is a link, and its path is the point.
        pythons={name: os.path.abspath(path) for name, path in pythons.items() if path},
        only=only,
        preload=values.vllm_preload,
        pause=values.pause,
        llama_cpp=values.llama_cpp.resolve() if values.llama_cpp is not None else None,
        imposed=values.imposed,
        mtp=values.mtp,
        int4=values.int4,
        eagle3=values.eagle3.resolve() if values.eagle3 is not None else None,
        text=values.text,
        loads=(
            *(Load(int(word)) for word in filter(None, values.concurrency.split(","))),
            *(Load(RATE_SLOTS, float(word)) for word in filter(None, values.rates.split(","))),
        ),
        load_tokens=values.load_tokens,
        load_rounds=values.load_rounds,
        activations=values.activations,
        instructions=values.instructions,
        out=values.out,
    )

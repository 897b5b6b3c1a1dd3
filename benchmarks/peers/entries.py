"""The processes of a comparison: each peer in each mode, with its makers' environment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.peers.options import Options
from benchmarks.peers.untied import is_latent
from benchmarks.peers.worker import Entry

ROWS_ENTRY = "spd-rows"
IMPOSED = "imposed"
ONLY = MappingProxyType(
    {
        IMPOSED: ("spd", "vllm", "llama"),
        "mtp": ("spd", "vllm"),
        "eagle3": ("spd", "vllm"),
        "int4": ("spd", "llama"),
        f"int4-{IMPOSED}": ("spd", "llama"),
    }
)
"""Modes that not every peer has."""
TOGETHER = ("spd", "vllm", "llama")
"""Peers that run several requests together; transformers' speculation takes one at a time."""


def entries(options: Options) -> list[Entry]:
    """List the processes to compare, in the order of a round."""
    selected = []
    k = ["--draft-max", str(options.draft_max)]
    modes = {"plain": [], "draft": ["--draft", str(options.draft), *k], "ngram": ["--ngram", *k]}
    if options.imposed is not None:
        modes[IMPOSED] = [*modes["draft"], "--imposed", str(options.imposed)]
    if options.mtp:
        modes["mtp"] = ["--mtp", *k]
    if options.eagle3 is not None:
        modes["eagle3"] = ["--eagle3", str(options.eagle3), *k]
    if options.int4:
        modes |= {f"int4-{mode}": [*modes[mode], "--int4"] for mode in (IMPOSED,) if mode in modes}
        modes["int4"] = ["--int4"]
    for peer, python in options.pythons.items():
        for mode, arguments in modes.items():
            if peer not in ONLY.get(mode, (peer,)):
                continue
            selected.append(
                _entry(
                    options=options,
                    name=f"{peer}-{mode}",
                    peer=peer,
                    python=python,
                    arguments=arguments,
                )
            )
    if options.rows > 1 and "spd" in options.pythons:
        extra = ["--rows", str(options.rows), "--draft", str(options.draft)]
        selected.append(
            _entry(
                options=options,
                name=ROWS_ENTRY,
                peer="spd",
                python=options.pythons["spd"],
                arguments=extra,
                together=False,
            )
        )
    chosen = [entry for entry in selected if not options.only or entry.name in options.only]
    if not chosen:
        raise SystemExit(
            f"nothing to compare: the entries are {', '.join(entry.name for entry in selected)}"
        )
    return chosen


def _entry(
    options: Options,
    name: str,
    peer: str,
    python: str,
    arguments: Sequence[str],
    together: bool = True,
) -> Entry:
    command = [python, "-m", f"benchmarks.peers.{peer}_worker", "--model", str(options.model)]
    command += [
        "--threads",
        str(options.threads),
        "--dtype",
        options.dtype,
        "--ctx",
        str(options.ctx),
    ]
    command += ["--slots", str(options.slots)]
    if peer == "spd":
        command += ["--activations", options.activations]
        if options.instructions is not None:
            command += ["--instructions", options.instructions]
    if peer == "llama":
        command += ["--build", str(options.llama_cpp)]
    threads = str(options.threads)
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment |= {"HF_HUB_OFFLINE": "1"}
    if peer == "vllm":
        # As its CPU guide asks: threads bound by vLLM itself, Intel OpenMP and tcmalloc preloaded.
        del environment["OMP_NUM_THREADS"]
        environment["VLLM_TARGET_DEVICE"] = "cpu"
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB, of each of its workers
        environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cpus))
        environment["VLLM_NO_USAGE_STATS"] = "1"
        if is_latent(options.model):
            # Its latent kernels for CPU take DeepSeek's own 576 numbers a position only; ordinary heads any.
            environment["VLLM_MLA_DISABLE"] = "1"
        # Its clock runs on while a worker is paused; five minutes, the default, pass while others load.
        environment["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "86400"
        preload = options.preload if options.preload is not None else find_preload(Path(python))
        if preload:
            environment["LD_PRELOAD"] = preload
    return Entry(name, (*command, *arguments), environment, together=together and peer in TOGETHER)


def find_preload(python: Path) -> str:
    """Find the libraries vLLM's CPU guide wants preloaded; what is not installed is left out."""
    patterns = (
        (python.parents[1] / "lib", "libiomp5.so"),
        (Path("/usr/lib"), "*-linux-gnu/libtcmalloc_minimal.so.4"),
    )
    libraries = [next(iter(sorted(folder.glob(pattern))), None) for folder, pattern in patterns]
    return ":".join(str(path) for path in libraries if path)

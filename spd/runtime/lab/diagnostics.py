"""The checks of `spd doctor`: each imports what it needs, and is a finding where it fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from spd.formats.hub import cache_folder, list_cached_models, list_models, spd_cache_folder
from spd.formats.stores import HUB
from spd.kernels.native.build import processor_features
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.cpu_load import NEGLIGIBLE_LOAD, OtherProcessLoad
from spd.version import __version__

OK = "ok"
WARNING = "warning"
FAILED = "failed"
GIB = 2**30
LOW_DISK_BYTES = 2 * GIB
NUM_TOKENS = 24
REPORT_FIX = "spd doctor --json, and report what it prints"


@dataclass(frozen=True)
class Finding:
    """The result of one check: its status, one line, what to type if it is not ok, and numbers."""

    status: str
    line: str
    fix: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One check. It is skipped where a step in `needs` failed."""

    name: str
    check: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    slow: bool = False

    def run(self, done: Mapping[str, Finding]) -> Finding:
        """Run the check, unless a needed one in `done` has failed; an Exception becomes a
        finding.
        """
        failed = [name for name in self.needs if name in done and done[name].status == FAILED]
        if failed:
            return Finding(WARNING, f"not checked, because {failed[0]} failed")
        try:
            return self.check()
        except Exception as error:
            text = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            fix = tuple(getattr(error, "fix", ())) or (REPORT_FIX,)
            return Finding(
                FAILED, text, fix, {"traceback": "".join(traceback.format_exception(error))}
            )


def diagnostic_steps(*, quick: bool = False) -> list[Step]:
    """Return every check in order; `quick` leaves out those that compile or generate."""
    all_steps = [
        Step("packages", check_package_versions),
        Step("disk", check_storage),
        Step("cpu", check_processor),
        Step("cuda", check_cuda_devices, ("cpu",)),
        Step("triton", check_triton, ("cpu",)),
        Step("demo", check_demo, ("cpu",)),
        Step("gpu tiles", check_token_tiles, ("cpu", "triton"), slow=True),
        Step("activations", check_activations, ("cpu",), slow=True),
        Step("generation", check_texts, ("cpu", "demo"), slow=True),
    ]
    return [step for step in all_steps if not (quick and step.slow)]


def _version_numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


REQUIREMENT = re.compile(r"([\w-]+)([^;]*)(; platform_system .*)?")
"""A requirement: its name, bounds and system; matches none of an extra or of another Python."""


def check_package_versions() -> Finding:
    """Compare the interpreter and installed versions with what `spd` requires."""
    versions: dict[str, str] = {"spd": __version__, "python": platform.python_version()}
    missing = []
    unsuitable = []
    for requirement in filter(
        None, map(REQUIREMENT.fullmatch, importlib.metadata.requires("spd") or ())
    ):
        name, bounds_text, optional = requirement.groups()
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing += [] if optional else [f"{name}{bounds_text}"]
            continue
        installed = _version_numbers(versions[name])
        bounds = [
            (sign, _version_numbers(bound))
            for sign, bound in re.findall(r"(<|>=)([\d.]+)", bounds_text)
        ]
        if not all(
            installed < bound if sign == "<" else installed >= bound for sign, bound in bounds
        ):
            unsuitable.append(f"{name}{bounds_text}")
    line = " · ".join(f"{name} {version}" for name, version in versions.items())
    versions["system"] = platform.platform()
    install = "pip install " + " ".join(f"'{requirement}'" for requirement in missing + unsuitable)
    if missing:
        return Finding(FAILED, f"missing: {', '.join(missing)}", (install,), versions)
    if unsuitable:
        return Finding(
            WARNING, f"{line} · spd asks for {', '.join(unsuitable)}", (install,), versions
        )
    return Finding(OK, line, (), versions)


def _nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    while not folder.exists():
        folder = folder.parent
    return folder


def check_storage() -> Finding:
    """Count stored models, and free space for more and for temporary files."""
    cache = cache_folder()
    models = list_cached_models()
    if cache.exists() and not (cache.is_dir() and os.access(cache, os.R_OK | os.X_OK)):
        return Finding(FAILED, f"{cache} cannot be read", (f"make {cache} a folder you can read",))
    free = {
        str(folder): shutil.disk_usage(_nearest_existing(folder)).free
        for folder in (cache, Path(tempfile.gettempdir()))
    }
    facts = {"folder": str(cache), "models": models, "free_bytes": free}
    free_texts = (
        f"{free_bytes / GIB:.1f} GiB free for {folder}" for folder, free_bytes in free.items()
    )
    by_program = Counter(model.store for model in list_models() if model.store != HUB)
    program_counts = (f"{count} of {program}" for program, count in by_program.items())
    line = " · ".join(
        [*free_texts, ", ".join([f"{len(models)} models downloaded", *program_counts])]
    )
    if min(free.values()) < LOW_DISK_BYTES:
        return Finding(
            WARNING, line, ("free some space, or set HF_HOME and TMPDIR to another disk",), facts
        )
    return Finding(OK, line, (), facts)


def check_demo() -> Finding:
    """Check that the embedded demo can be planned with default options; loads no weights."""
    from spd.formats.demo import demo_folder
    from spd.runtime.plan.memory import position_bytes
    from spd.runtime.plan.plan import make_plan

    plan = make_plan(EngineConfig(model=demo_folder()))
    facts = plan.as_dict()
    words = [f"{name} {facts[name]}" for name in ("device", "dtype", "kernels", "lag", "threads")]
    whole, rounded = (
        position_bytes(plan.model.config, kind) for kind in (plan.shape.dtype, "int8")
    )
    words.append(f"cache {whole:,} bytes a token, {rounded:,} with --kv int8")
    return Finding(
        OK, " · ".join([*words, f"{plan.memory_budget_bytes / GIB:.1f} GiB to use"]), (), facts
    )


def check_processor() -> Finding:
    """Check the CPU, the C kernels' needs, and the threads."""
    import torch

    from spd.kernels.native.build import instructions, unavailable_reason

    load = OtherProcessLoad()
    obstacle_reason = unavailable_reason()
    time.sleep(0.3)  # in which other programs are watched
    facts = {
        **describe_machine(),
        "threads": torch.get_num_threads(),
        "other_load": round(load.read_load(), 2),
    }
    threads = f"{facts['threads']} threads of {facts['cores']} cores"
    if facts["other_load"] > NEGLIGIBLE_LOAD:
        threads += f", of which other programs keep {facts['other_load']:.1f} busy"
    instruction_set = facts["instructions"] = instructions()
    kernels = (
        f"C kernels for {instruction_set}"
        if obstacle_reason is None
        else f"torch's slower kernels: {obstacle_reason}"
    )
    if obstacle_reason is None and instruction_set in ("AVX2", "AVX512", "AVX512-VNNI"):
        kernels += " (AVX512-BF16 or AMX would verify drafts at less cost)"
    line = " · ".join([facts["cpu"], kernels, threads])
    fix = (
        ("install gcc, or pip install 'spd[compiler]'",)
        if obstacle_reason and instruction_set
        else ()
    )
    return Finding(WARNING if fix else OK, line, fix, facts)


class CudaDevice(TypedDict):
    """One CUDA device, as JSON."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def check_cuda_devices() -> Finding:
    """List every CUDA device with its memory, and the driver."""
    import torch

    from spd.runtime.load.token_tiles import nvidia_driver_version

    driver = nvidia_driver_version()
    devices: list[CudaDevice] = []
    facts = {"devices": devices, "driver": driver}
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is None:
            fix = "pip install --force-reinstall torch, from the index for your CUDA version"
            return Finding(
                WARNING, f"driver {driver}, but torch is built for CPUs only", (fix,), facts
            )
        if driver:
            fix = "nvidia-smi, to see whether the driver works; CUDA_VISIBLE_DEVICES hides devices"
            return Finding(WARNING, f"driver {driver}, but torch sees no device", (fix,), facts)
        return Finding(OK, "no CUDA device: everything runs on the CPU", (), facts)
    device_texts = []
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_name(index)
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {"name": name, "capability": capability, "free_bytes": free, "total_bytes": total}
        )
        kind = f"sm_{capability[0]}{capability[1]}"
        device_texts.append(f"{index} {name} {kind} {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    line = f"{'; '.join(device_texts)} · driver {driver or 'unknown'}"
    return Finding(OK, line, (), facts)


def check_triton() -> Finding:
    """Check that Triton can be imported, compiles rather than interprets, and can store its programs.

    Failed where a GPU lacks it, which then runs torch's slower kernels; otherwise a warning.
    """
    import torch

    try:
        import triton
        from triton import knobs
    except ImportError as error:
        line = f"cannot be imported: {error}"
        fix = ("pip install triton",)
        return Finding(
            FAILED if torch.cuda.is_available() else WARNING, line, fix, {"version": None}
        )
    interpreted = bool(knobs.runtime.interpret)
    cache = Path(knobs.cache.dir)
    facts = {"version": triton.__version__, "interpreted": interpreted, "cache": str(cache)}
    if interpreted:
        line = f"triton {triton.__version__}, interpreted (TRITON_INTERPRET is set): very slow"
        return Finding(WARNING, line, ("unset TRITON_INTERPRET",), facts)
    try:
        with tempfile.TemporaryFile(dir=_nearest_existing(cache)):
            return Finding(OK, f"triton {triton.__version__} · keeps kernels in {cache}", (), facts)
    except OSError as error:
        line = f"triton {triton.__version__} · {cache} cannot be written ({error.strerror})"
        return Finding(WARNING, line, ("set TRITON_CACHE_DIR to a folder you can write to",), facts)


def check_token_tiles() -> Finding:
    """Measure how wide each GPU's tiles of tokens may be, and store the answers for engines."""
    from triton import knobs

    from spd.runtime.lab.tile_checks import find_widest_tiles

    answers = [] if knobs.runtime.interpret else find_widest_tiles(spd_cache_folder)
    if not answers:
        return Finding(OK, "not asked: no GPU runs Triton's kernels here", (), {"asked": []})
    words = "; ".join(
        " ".join(f"{kind} {tile}" for kind, tile in answer["widest"].items()) for answer in answers
    )
    line = f"tiles of tokens that change no bit: {words}"
    if any(answer["file"] is None for answer in answers):
        fix = "make ~/.cache/spd yours and writable, or set XDG_CACHE_HOME"
        return Finding(
            WARNING, f"{line}; that cannot be kept for engines", (fix,), {"asked": answers}
        )
    return Finding(OK, line, (), {"asked": answers})


def check_activations() -> Finding:
    """Measure what `--activations int8` brings to products of this processor."""
    from spd.kernels.native.build import NativeUnavailable
    from spd.kernels.native.library import open_library
    from spd.runtime.lab.activation_costs import measure_time_ratios

    try:
        native = open_library(spd_cache_folder, "bfloat16")
    except NativeUnavailable as error:
        return Finding(OK, f"not measured: {error}", (), {"time_ratios": {}})
    ratios = measure_time_ratios(native)
    words = "; ".join(
        f"{form} weights "
        + ", ".join(f"{ratio:.2f} for {_count_rows(rows)}" for rows, ratio in by_rows.items())
        for form, by_rows in ratios.items()
    )
    line = f"--activations int8, times the time of whole ones: {words}"
    return Finding(OK, line, (), {"time_ratios": ratios})


def _count_rows(rows: int) -> str:
    """Return a number of rows in words."""
    return "a row" if rows == 1 else f"{rows} rows"


def check_texts() -> Finding:
    """Check that the demo generates the same tokens with drafts, without them, and by torch."""
    from spd.formats.demo import demo_folder
    from spd.runtime.lab.prompt_set import encode_prompts, read_prompts, select_prompts
    from spd.runtime.lab.replay import make_requests, replay_requests

    # One thread: more do not speed up a model of this size, and slow it down on a busy machine.
    plain = EngineConfig(model=demo_folder(), spec="off", ctx=512, threads=1)
    # The greedy reply to this prompt holds no near tie, which other kernels might decide otherwise.
    prompts = encode_prompts(
        plain.model, select_prompts(read_prompts(), ["reasoning"], 1), [None], NUM_TOKENS
    )
    requests = make_requests(
        prompts, (0.0, 0.8), max_tokens=NUM_TOKENS, min_tokens=0, ignore_eos=True
    )
    with_drafts = replay_requests(plain, replace(plain, spec="draft", adaptive=False), requests)
    with_torch = replay_requests(replace(plain, kernels="torch"), plain, requests[:1])
    kernels = with_torch.plans[1]["kernels"]
    accepted = with_drafts.speculated
    line = (
        f"{with_drafts.tokens} tokens of the demo by {kernels} kernels, {accepted} of them drafted"
    )
    facts = {"tokens": with_drafts.tokens, "accepted": with_drafts.speculated, "kernels": kernels}
    facts["differences"] = [*with_drafts.differences, *with_torch.differences]
    if with_drafts.differences:
        return Finding(FAILED, f"{line}: not the same text", ("--spec off", REPORT_FIX), facts)
    if with_torch.differences:
        return Finding(
            FAILED, f"{line}: not the text of torch's", ("--kernels torch", REPORT_FIX), facts
        )
    return Finding(OK, f"{line}: the same text", (), facts)


CPU_FEATURES = {"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm"}


def describe_machine() -> dict[str, Any]:
    """Return the CPU's model and features, cores, memory and system; with torch, the GPU."""
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(
        r"^model name\s*:\s*(.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE
    )
    description = {
        "cpu": match[1] if match else platform.processor(),
        "cpu_features": sorted(processor_features() & CPU_FEATURES),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        description |= {
            "gpu": properties.name,
            "gpu_memory_bytes": properties.total_memory,
            "cuda": str(torch.version.cuda),
            "triton": getattr(sys.modules.get("triton"), "__version__", None),
        }
    return description

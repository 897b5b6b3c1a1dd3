"""What this machine offers `spd`, one finding a question; heavy libraries are imported by the question.

A step that raises is a finding too, so that a broken library is reported and not run into.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spd.runtime.round.cpu_load import SLIGHT, OtherLoad

OK, WARNING, FAILED = "ok", "warning", "failed"
GIB = 2**30
LOW_DISK = 2 * GIB
LOW_MEMORY = GIB
SUPPORTED: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "torch": ("2.9", "2.14"),
        "triton": ("3.5", None),
        "safetensors": ("0.5", None),
        "tokenizers": ("0.21", None),
        "huggingface_hub": ("1.1", None),
        "typer": ("0.27", "0.29"),
        "rich": ("13.9", None),
        "jinja2": ("3.1.6", None),
        "llguidance": ("1.9", "2"),
        "prompt_toolkit": ("3.0.48", None),
        "starlette": ("1.0", None),
        "uvicorn": ("0.40", None),
    }
)
"""Versions that the package asks for: at least the first, below the second."""
OPTIONAL = ("triton",)
REPORT = "spd doctor --json, and report what it prints"


@dataclass(frozen=True)
class Finding:
    """The answer to one question: its status, one line, what to type where it is not ok, and numbers."""

    status: str
    line: str
    fix: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One question. It is not asked where a step in `needs` failed."""

    name: str
    ask: Callable[[], Finding]
    needs: tuple[str, ...] = ()
    slow: bool = False

    def run(self, done: Mapping[str, Finding]) -> Finding:
        """Ask, unless something needed has failed; never raises an Exception."""
        lacking = [name for name in self.needs if name in done and done[name].status == FAILED]
        if lacking:
            return Finding(WARNING, f"not checked, because {lacking[0]} failed")
        try:
            return self.ask()
        except Exception as error:
            words = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
            fix = tuple(getattr(error, "fix", ())) or (REPORT,)
            return Finding(FAILED, text, fix, {"traceback": "".join(traceback.format_exception(error))})


def steps(*, quick: bool = False) -> list[Step]:
    """Every question in order; `quick` leaves out those that compile or generate."""
    from spd.runtime.lab import smoke

    asked = [
        Step("packages", package_versions),
        Step("memory", main_memory),
        Step("disk", free_disk),
        Step("hf cache", hugging_face_cache),
        Step("demo", demo_files),
        Step("torch", torch_build),
        Step("cpu", processor, ("torch",)),
        Step("cuda", cuda_devices, ("torch",)),
        Step("triton", triton_library, ("torch",)),
        Step("compile cache", compile_cache, ("torch", "triton")),
        Step("plan", demo_plan, ("torch", "demo")),
    ]
    tried = [
        Step("gpu kernel", smoke.gpu_kernel, ("torch", "triton", "compile cache"), slow=True),
        Step("gpu tiles", smoke.token_tiles, ("torch", "triton", "gpu kernel"), slow=True),
        Step("cpu kernel", smoke.cpu_kernel, ("torch",), slow=True),
        Step("generation", smoke.equal_texts, ("torch", "demo", "plan"), slow=True),
    ]
    return asked if quick else asked + tried


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def package_versions() -> Finding:
    """The interpreter and versions of what `spd` imports, against what it asks for."""
    from spd import __version__

    found: dict[str, str] = {"spd": __version__, "python": platform.python_version()}
    missing, odd = [], []
    for name, (low, high) in SUPPORTED.items():
        wanted = f"{name}>={low}" + (f",<{high}" if high else "")
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                missing.append(wanted)
            continue
        known = _version(found[name])
        if known < _version(low) or (high is not None and known >= _version(high)):
            odd.append(wanted)
    line = " · ".join(f"{name} {version}" for name, version in found.items())
    found["system"] = platform.platform()
    install = "pip install " + " ".join(f"'{wanted}'" for wanted in missing + odd)
    if missing:
        return Finding(FAILED, f"missing: {', '.join(missing)}", (install,), found)
    if odd:
        return Finding(WARNING, f"{line} · spd asks for {', '.join(odd)}", (install,), found)
    return Finding(OK, line, (), found)


def main_memory() -> Finding:
    """Memory of the host, in bytes."""
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    numbers = {name: int(rest.split()[0]) * 1024 for name, rest in lines}
    total, free = numbers["MemTotal"], numbers["MemAvailable"]
    facts = {"total_bytes": total, "available_bytes": free}
    line = f"{free / GIB:.1f} GiB available of {total / GIB:.1f} GiB"
    if free < LOW_MEMORY:
        return Finding(WARNING, line, ("close other programs, or use a small --ctx",), facts)
    return Finding(OK, line, (), facts)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists():
        folder = folder.parent
    return folder


def free_disk() -> Finding:
    """Room where models and temporary files are kept."""
    from spd.formats.hub import cache_folder

    facts = {}
    for folder in (cache_folder(), Path(tempfile.gettempdir())):
        facts[str(folder)] = shutil.disk_usage(_existing(folder)).free
    line = " · ".join(f"{free / GIB:.1f} GiB free for {folder}" for folder, free in facts.items())
    if min(facts.values()) < LOW_DISK:
        return Finding(WARNING, line, ("free some space, or set HF_HOME and TMPDIR to another disk",), facts)
    return Finding(OK, line, (), facts)


def hugging_face_cache() -> Finding:
    """Where downloaded models are looked for, and how many there are."""
    from spd.formats.hub import cache_folder, list_cached_models

    folder = cache_folder()
    facts = {"folder": str(folder), "models": list_cached_models()}
    if not folder.exists():
        return Finding(OK, f"{folder} is not there yet: only folders and the demos can be used", (), facts)
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return Finding(FAILED, f"{folder} cannot be read", (f"make {folder} a folder you can read",), facts)
    return Finding(OK, f"{folder} · {len(facts['models'])} models", (), facts)


def demo_files() -> Finding:
    """Whether the embedded demos are there, every file as it was published."""
    from spd.formats.demo import DEMOS, demo_faults, demo_folder

    faults = [f"{name}/{fault}" for name in DEMOS for fault in demo_faults(demo_folder(name))]
    facts = {"folder": str(demo_folder()), "faults": faults}
    if faults:
        return Finding(FAILED, "; ".join(faults), ("install spd again",), facts)
    return Finding(OK, "embedded models, a draft and a head, every file's hash as recorded", (), facts)


def torch_build() -> Finding:
    """What torch was built for, and whether that fits the machine."""
    import torch

    from spd.runtime.load.token_tiles import driver_version

    facts = {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU only"
    line = f"torch {torch.__version__} {built}"
    driver = driver_version()
    if driver and torch.version.cuda is None:
        return Finding(
            WARNING,
            f"{line}, but there is an NVIDIA driver ({driver})",
            ("pip install --force-reinstall torch, from the index for your CUDA version",),
            facts,
        )
    return Finding(OK, line, (), facts)


LOOK = 0.3
"""Seconds that the load of other programs is watched."""


def processor() -> Finding:
    """The CPU, the instructions that matter for matrix products, and the threads."""
    import torch

    from spd.kernels.native.build import obstacle
    from spd.runtime.plan.machine import cpu_has_fast_bfloat16

    compiled = obstacle() is None
    load = OtherLoad()
    time.sleep(LOOK)
    facts: dict[str, Any] = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": bool(torch.cpu._is_amx_tile_supported()),
        "avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
        "bfloat16": compiled or cpu_has_fast_bfloat16(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "onednn": bool(torch._C._has_mkldnn),
        "other_load": round(load.read(), 2),
    }
    names = [name for name, fact in (("AMX", "amx"), ("AVX512-BF16", "avx512_bf16")) if facts[fact]]
    rest = "bfloat16 products by FMA" if compiled else "no bfloat16 products: float32 is used"
    threads = f"{facts['threads']} threads of {facts['cores']} cores"
    if facts["other_load"] > SLIGHT:
        threads += f", of which other programs keep {facts['other_load']:.1f} busy"
    line = f"{facts['capability']} · {', '.join(names or [rest])} · {threads}"
    if not facts["onednn"]:
        return Finding(WARNING, f"{line} · torch lacks oneDNN", ("install torch from its own index",), facts)
    return Finding(OK, line, (), facts)


def cuda_devices() -> Finding:
    """Every CUDA device with its memory, and the driver."""
    import torch

    from spd.runtime.load.token_tiles import driver_version
    from spd.runtime.plan.kernel_choice import OLDEST_CAPABILITY

    driver = driver_version()
    devices: list[dict[str, Any]] = []
    facts = {"devices": devices, "driver": driver}
    if not torch.cuda.is_available():
        if driver and torch.version.cuda is not None:
            fix = "nvidia-smi, to see whether the driver works; CUDA_VISIBLE_DEVICES hides devices"
            return Finding(WARNING, f"driver {driver}, but torch sees no device", (fix,), facts)
        return Finding(OK, "no CUDA device: everything runs on the CPU", (), facts)
    shown, old = [], []
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": name, "capability": capability, "free_bytes": free, "total_bytes": total})
        kind = "sm_{}{}".format(*capability)
        shown.append(f"{index} {name} {kind} {free / GIB:.1f} of {total / GIB:.1f} GiB free")
        old += [name] if capability < OLDEST_CAPABILITY else []
    line = f"{'; '.join(shown)} · driver {driver or 'unknown'}"
    if old:
        line += f" · older than sm_80, so that torch's kernels run: {', '.join(old)}"
        return Finding(WARNING, line, ("a newer GPU, if there is one: --device cuda:N",), facts)
    return Finding(OK, line, (), facts)


def triton_library() -> Finding:
    """Whether Triton can be imported; without it a GPU runs torch's kernels."""
    import torch

    try:
        import triton
        from triton import knobs
    except ImportError as error:
        line, fix = f"cannot be imported: {error}", ("pip install triton",)
        return Finding(FAILED if torch.cuda.is_available() else WARNING, line, fix, {"version": None})
    facts = {"version": triton.__version__, "interpreted": bool(knobs.runtime.interpret)}
    if facts["interpreted"]:
        line = f"triton {triton.__version__}, interpreted (TRITON_INTERPRET is set): very slow"
        return Finding(WARNING, line, ("unset TRITON_INTERPRET",), facts)
    return Finding(OK, f"triton {triton.__version__}", (), facts)


def compile_cache() -> Finding:
    """Whether compiled kernels can be kept."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    there = _existing(folder)
    facts = {"folder": str(folder)}
    try:
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is no folder")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"spd")
    except OSError as error:
        fix = "set TRITON_CACHE_DIR to a folder you can write to"
        return Finding(WARNING, f"{folder} cannot be written ({error.strerror or error})", (fix,), facts)
    return Finding(OK, f"{folder} · writable", (), facts)


def demo_plan() -> Finding:
    """The plan for the demo with default options."""
    from spd.formats.demo import demo_folder
    from spd.runtime.plan.config import EngineConfig
    from spd.runtime.plan.plan import make_plan

    plan = make_plan(EngineConfig(model=demo_folder()))
    facts = plan.as_dict()
    words = [f"{name} {facts[name]}" for name in ("device", "dtype", "kernels", "graphs", "lag", "threads")]
    return Finding(OK, " · ".join([*words, f"{plan.memory_budget_bytes / GIB:.1f} GiB to use"]), (), facts)

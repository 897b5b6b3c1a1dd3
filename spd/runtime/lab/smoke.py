"""Small real runs for `diagnostics`: a Triton kernel, a CPU product, and one text made in two ways."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from spd.runtime.lab.diagnostics import FAILED, OK, REPORT, WARNING, Finding

SIZE = 4096
ROWS = 4
WEIGHTS = 12
"""Different weights read in turn, so that none is still in a cache when its turn comes again."""
SLOW_SHARE = 0.5
"""Of what a copy reaches; a product that reads slower is worth a warning."""
PROMPT = "def read_lines(path):"
NUM_TOKENS = 8


def triton_kernel() -> Finding:
    """Compile a Triton kernel, run it, compare and time it where there is a GPU."""
    from triton import knobs

    if knobs.runtime.interpret:
        return _interpreted()
    if (why := _no_gpu()) is not None:
        return Finding(OK, f"none is compiled or run: {why}", (), {"ran": False})
    with knobs.compilation.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a new Triton announces its plans
        knobs.compilation.always_compile = True
        return _run_on_gpu()


def _no_gpu() -> str | None:
    """Why Triton's kernels have nothing to run on."""
    import torch

    from spd.runtime.plan.kernel_choice import OLDEST_CAPABILITY

    if not torch.cuda.is_available():
        return "there is no GPU"
    return "the GPU is too old" if torch.cuda.get_device_capability() < OLDEST_CAPABILITY else None


def token_tiles() -> Finding:
    """Ask each GPU how wide its tiles of tokens may be, and keep what it answers for engines."""
    from triton import knobs

    from spd.formats.hub import own_cache
    from spd.runtime.lab.tile_questions import ask_gpus

    if (why := "kernels are interpreted" if knobs.runtime.interpret else _no_gpu()) is not None:
        return Finding(OK, f"not asked: {why}", (), {"asked": []})
    began = time.perf_counter()
    answers = ask_gpus(own_cache)
    words = "; ".join(" ".join(f"{kind} {tile}" for kind, tile in each["widest"].items()) for each in answers)
    line = f"tiles of tokens that change no bit: {words} · asked in {time.perf_counter() - began:.1f} s"
    if any(each["file"] is None for each in answers):
        fix = "make ~/.cache/spd yours and writable, or set XDG_CACHE_HOME"
        return Finding(WARNING, f"{line}; that cannot be kept for engines", (fix,), {"asked": answers})
    return Finding(OK, line, (), {"asked": answers})


def _difference(y: Any, x: Any, weight: Any) -> float:
    """The largest error of y = x Wᵀ against float64, as a share of the largest element."""
    exact = x.double() @ weight.double().t()
    return float((y.double() - exact).abs().max() / exact.abs().max())


def _interpreted() -> Finding:
    import torch

    from spd.kernels.linear.skinny_linear_triton import linear

    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    error = _difference(linear(x, weight, None), x, weight)
    facts = {"ran": False, "interpreted": True, "error": error}
    if not error < 1e-5:
        line = f"a product in Triton's interpreter is off by {error:.1e} of its largest element"
        return Finding(FAILED, line, (REPORT,), facts)
    line = "a product agrees in Triton's interpreter; nothing was compiled"
    return Finding(WARNING, line, ("unset TRITON_INTERPRET",), facts)


def _run_on_gpu() -> Finding:
    import torch
    import torch.nn.functional as F

    from spd.kernels.linear.skinny_linear_triton import linear

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    x, weights = draw(ROWS, SIZE), [draw(SIZE, SIZE) for _ in range(WEIGHTS)]
    began = time.perf_counter()
    y = linear(x, weights[0], None)
    torch.cuda.synchronize()
    compiled = time.perf_counter() - began
    error, usual = (_difference(out, x, weights[0]) for out in (y, F.linear(x, weights[0])))
    seconds = _graph_seconds(lambda: [linear(x, weight, None) for weight in weights]) / WEIGHTS
    source, target = (torch.empty(WEIGHTS * SIZE * SIZE, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    copied = _graph_seconds(lambda: [target.copy_(source)])
    size = 2 * SIZE * SIZE
    speed, copy_speed = 1e-9 * size / seconds, 2e-9 * WEIGHTS * size / copied
    facts = {"ran": True, "compile_seconds": compiled, "error": error, "torch_error": usual}
    facts |= {"microseconds": 1e6 * seconds, "gb_per_second": speed, "copy_gb_per_second": copy_speed}
    line = (
        f"{SIZE}x{SIZE} bfloat16 product compiled in {compiled:.1f} s, {1e6 * seconds:.1f} us, "
        f"{speed:,.0f} GB/s read (a copy moves {copy_speed:,.0f})"
    )
    if not error <= 2 * usual + 1e-3:
        line = f"{line}; off by {error:.1e}, torch by {usual:.1e}"
        return Finding(FAILED, line, ("--kernels torch", REPORT), facts)
    if speed < SLOW_SHARE * copy_speed:
        fix = "look with nvidia-smi for other programs, or a low power limit"
        return Finding(WARNING, f"{line}: slow", (fix,), facts)
    return Finding(OK, line, (), facts)


def _graph_seconds(work: Callable[[], Any]) -> float:
    """The shortest time of five that the device takes for `work`, launches left out."""
    import torch

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(6):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(1e-3 * float(began.elapsed_time(ended)))
    return min(times[1:])


def processor_linear() -> Finding:
    """Time the CPU's product in the dtype that the plan would choose, and compare it with float64."""
    import torch

    from spd.formats.hub import own_cache
    from spd.kernels.dispatch import load_kernels
    from spd.kernels.native.build import NativeUnavailable
    from spd.runtime.layers.linear import Linear
    from spd.runtime.plan.machine import cpu_has_fast_bfloat16

    try:
        native, by = load_kernels("native", own_cache).native, "C"
    except NativeUnavailable as why:
        native, by = None, f"torch, for {why}"
    dtype = torch.bfloat16 if native is not None or cpu_has_fast_bfloat16() else torch.float32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, SIZE, generator=generator).to(dtype)
    weight = torch.randn(SIZE, SIZE, generator=generator).to(dtype)
    if native is not None:
        packed, library = native.pack(weight), native
        by = f"C ({native.instructions})"

        def product() -> torch.Tensor:
            return library.linear(x, packed, None)
    else:
        layer = Linear(weight)

        def product() -> torch.Tensor:
            return layer.product(x, ROWS)

    with torch.inference_mode():
        error = _difference(product(), x, weight)
        seconds = _shortest(product)
        target = torch.empty_like(weight)
        copied = _shortest(lambda: target.copy_(weight))
    size = weight.numel() * weight.element_size()
    speed, copy_speed = 1e-9 * size / seconds, 2e-9 * size / copied
    name = str(dtype).removeprefix("torch.")
    facts: dict[str, Any] = {"dtype": name, "by": by, "error": error, "milliseconds": 1e3 * seconds}
    facts |= {"gb_per_second": speed, "copy_gb_per_second": copy_speed}
    line = (
        f"{SIZE}x{SIZE} {name} product of {ROWS} rows by {by} in {1e3 * seconds:.1f} ms, "
        f"{speed:.1f} GB/s read (a copy moves {copy_speed:.1f})"
    )
    if not error < (1e-2 if dtype == torch.bfloat16 else 1e-5):
        line = f"{line}; off by {error:.1e} of the largest element"
        return Finding(FAILED, line, ("--dtype float32", REPORT), facts)
    return Finding(OK, line, (), facts)


def _shortest(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def equal_texts() -> Finding:
    """Generate a few tokens of the demo, speculated and not; they must be the same."""
    from spd.formats.demo import demo_folder
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.engine.engine import Engine
    from spd.runtime.engine.request import Request
    from spd.runtime.plan.config import EngineConfig
    from spd.runtime.round.sampling_params import SamplingParams

    prompt = tuple(Tokenizer.open(demo_folder()).encode(PROMPT))
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    facts: dict[str, Any] = {}
    for spec in ("off", "draft"):
        began = time.perf_counter()
        # One thread: more gain a model of this size nothing, and lose much on a busy machine.
        wishes = EngineConfig(model=demo_folder(), spec=spec, ctx=512, adaptive=False, threads=1)
        engine = Engine(wishes)
        events = list(engine.stream([Request("doctor", prompt, params)]))
        tokens[spec] = [token for event in events for token in event.token_ids]
        metrics = engine.metrics("doctor")
        engine.close()
        facts |= {f"{spec}_seconds": time.perf_counter() - began, f"{spec}_rounds": metrics.rounds}
    facts |= {"tokens": tokens["off"], "drafted": metrics.draft_n, "accepted": metrics.draft_n_accepted}
    rounds = f"{facts['off_rounds']} rounds, {facts['draft_rounds']} speculated"
    line = f"{NUM_TOKENS} tokens of the demo in {rounds}"
    if tokens["off"] != tokens["draft"] or len(tokens["off"]) != NUM_TOKENS:
        return Finding(FAILED, f"{line}: not the same text", ("--spec off", REPORT), facts | tokens)
    return Finding(OK, f"{line}: the same text", (), facts)

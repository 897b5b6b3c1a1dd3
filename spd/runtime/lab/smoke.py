"""Small real runs for `diagnostics`: a product by Triton, one by the CPU's kernel, one text in two ways."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spd.runtime.lab.diagnostics import FAILED, OK, REPORT, WARNING, Finding

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 4096
ROWS = 4
WEIGHTS = 12
"""Different weights that a GPU reads in turn, so that none is still in a cache when its turn comes again."""
SLOW_SHARE = 0.5
"""Of what a copy reaches; a product on a GPU that reads slower is worth a warning."""
PROMPT = "def read_lines(path):"
NUM_TOKENS = 8


def _no_gpu() -> str | None:
    """Why Triton's kernels have nothing to run on."""
    import torch
    from triton import knobs

    from spd.runtime.plan.kernel_choice import OLDEST_CAPABILITY

    if knobs.runtime.interpret:
        return "kernels are interpreted"
    if not torch.cuda.is_available():
        return "there is no GPU"
    return "the GPU is too old" if torch.cuda.get_device_capability() < OLDEST_CAPABILITY else None


def gpu_kernel() -> Finding:
    """Compile a Triton kernel, run it, compare and time it where there is a GPU."""
    if (why := _no_gpu()) is not None:
        return Finding(OK, f"none is compiled or run: {why}", (), {"ran": False})
    import torch
    from triton import knobs

    from spd.kernels.linear.skinny_linear_triton import linear

    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)

    x, weights = draw(ROWS, SIZE), [draw(SIZE, SIZE) for _ in range(WEIGHTS)]
    with knobs.compilation.scope(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a new Triton announces its plans
        knobs.compilation.always_compile = True
        began = time.perf_counter()
        linear(x, weights[0], None)
        torch.cuda.synchronize()
    by = f"Triton, compiled in {time.perf_counter() - began:.1f} s"
    products = [partial(lambda weight: linear(x, weight, None)[0], weight) for weight in weights]
    return _judge(x, weights, products, by, _graph_seconds)


def cpu_kernel() -> Finding:
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
    x, weight = (torch.randn(n, SIZE, generator=generator).to(dtype) for n in (ROWS, SIZE))
    if native is None:
        layer = Linear(weight)
        return _judge(x, [weight], [lambda: layer.product(x, ROWS)], by, _shortest)
    library, packed = native, native.pack(weight)
    by = f"C ({native.instructions})"
    return _judge(x, [weight], [lambda: library.linear(x, packed, None)], by, _shortest)


def _judge(
    x: Tensor,
    weights: list[Tensor],
    products: Sequence[Callable[[], Tensor]],
    by: str,
    seconds_of: Callable[[Callable[[], Any]], float],
) -> Finding:
    """Hold x W^T of each weight against float64, and its speed against that of a copy."""
    import torch
    import torch.nn.functional as F

    with torch.inference_mode():
        exact = x.double() @ weights[0].double().t()
        found, usual = (
            float((y.double() - exact).abs().max() / exact.abs().max())
            for y in (products[0](), F.linear(x, weights[0]))
        )
        source = torch.stack(weights)
        target = torch.empty_like(source)
        seconds = seconds_of(lambda: [product() for product in products]) / len(products)
        copied = seconds_of(lambda: target.copy_(source)) / len(products)
    size, name = weights[0].nbytes, str(x.dtype).removeprefix("torch.")
    speed, copy_speed = 1e-9 * size / seconds, 2e-9 * size / copied
    facts = {"ran": True, "by": by, "dtype": name, "error": found, "torch_error": usual}
    facts |= {"microseconds": 1e6 * seconds, "gb_per_second": speed, "copy_gb_per_second": copy_speed}
    line = (
        f"{SIZE}x{SIZE} {name} product of {ROWS} rows by {by}: {1e6 * seconds:,.0f} us, "
        f"{speed:,.0f} GB/s read (a copy moves {copy_speed:,.0f})"
    )
    if not found <= 2 * usual + (1e-6 if x.dtype == torch.float32 else 1e-3):
        line = f"{line}; off by {found:.1e} of the largest element, torch by {usual:.1e}"
        return Finding(FAILED, line, ("--kernels torch", REPORT), facts)
    if x.is_cuda and speed < SLOW_SHARE * copy_speed:
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


def _shortest(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def token_tiles() -> Finding:
    """Ask each GPU how wide its tiles of tokens may be, and keep what it answers for engines."""
    from spd.formats.hub import own_cache
    from spd.runtime.lab.tile_questions import ask_gpus

    if (why := _no_gpu()) is not None:
        return Finding(OK, f"not asked: {why}", (), {"asked": []})
    began = time.perf_counter()
    answers = ask_gpus(own_cache)
    words = "; ".join(" ".join(f"{kind} {tile}" for kind, tile in each["widest"].items()) for each in answers)
    line = f"tiles of tokens that change no bit: {words} · asked in {time.perf_counter() - began:.1f} s"
    if any(each["file"] is None for each in answers):
        fix = "make ~/.cache/spd yours and writable, or set XDG_CACHE_HOME"
        return Finding(WARNING, f"{line}; that cannot be kept for engines", (fix,), {"asked": answers})
    return Finding(OK, line, (), {"asked": answers})


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
    rounds: dict[str, int] = {}
    for spec in ("off", "draft"):
        # One thread: more gain a model of this size nothing, and lose much on a busy machine.
        engine = Engine(EngineConfig(model=demo_folder(), spec=spec, ctx=512, adaptive=False, threads=1))
        events = list(engine.stream([Request("doctor", prompt, params)]))
        tokens[spec] = [token for event in events for token in event.token_ids]
        rounds[spec] = engine.metrics("doctor").rounds
        engine.close()
    line = f"{NUM_TOKENS} tokens of the demo in {rounds['off']} rounds, {rounds['draft']} speculated"
    facts = {"tokens": tokens, "rounds": rounds}
    if tokens["off"] != tokens["draft"] or len(tokens["off"]) != NUM_TOKENS:
        return Finding(FAILED, f"{line}: not the same text", ("--spec off", REPORT), facts)
    return Finding(OK, f"{line}: the same text", (), facts)

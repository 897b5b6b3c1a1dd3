"""The largest context and pages that fit into memory, and the options that free how much where
nothing does.

No torch here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from spd.errors import ResourceError, UsageError
from spd.kernels.attention.attention_chunks import KV_BLOCK
from spd.runtime.models.weight_forms import WIDE, WeightForm, int4_form
from spd.runtime.plan.config import METHODS, EngineConfig, format_size
from spd.runtime.plan.memory import (
    EngineShape,
    measure_memory,
    min_pages,
    snapshot_nbytes,
)
from spd.runtime.round.limits import PAGE_SIZE

SNAPSHOT_MEMORY_DIVISOR = 8
"""Snapshots of recurrent states take at most one part in so many of the usable memory."""
MIN_NAMED_SHARE = 0.01
"""A remedy that frees a smaller share of the total is not mentioned, unless it suffices."""


def find_largest(fits: Callable[[int], bool], limit: int, step: int) -> int:
    """Return the largest multiple of `step` below `limit`, or `limit`, that fits; 0 if none."""
    if fits(limit):
        return limit
    counts = range(1, -(-limit // step))
    return step * bisect_left(counts, True, key=lambda count: not fits(count * step))


def fits_in_memory(shape: EngineShape, usable: int | None) -> bool:
    """True if an engine of this shape takes at most `usable` bytes; False where they are
    unknown.
    """
    return usable is not None and measure_memory(shape).total <= usable


def fit_to_memory(
    shape: EngineShape, config: EngineConfig, device: str, free_bytes: int
) -> EngineShape:
    """Return the shape with an automatic context and number of pages cut to `free_bytes`.

    Pages are cut first, down to those of one request. Raises ResourceError, UsageError for fewer.
    """
    usable_bytes = int(free_bytes * config.memory_fraction)
    if shape.num_snapshots:
        snapshot_limit = usable_bytes // SNAPSHOT_MEMORY_DIVISOR // snapshot_nbytes(shape)
        shape = replace(shape, num_snapshots=min(snapshot_limit, shape.num_snapshots))

    def with_min_pages(ctx: int) -> EngineShape:
        return replace(with_context(shape, ctx), has_minimal_pages=shape.slots > 1)

    ctx = shape.ctx
    if not config.ctx:
        ctx = find_largest(
            lambda n: fits_in_memory(with_min_pages(n), usable_bytes), ctx, PAGE_SIZE
        )
    if not ctx or not fits_in_memory(with_min_pages(ctx), usable_bytes):
        smallest = with_min_pages(ctx or min(shape.ctx, PAGE_SIZE))
        raise memory_error(
            shape=smallest,
            device=device,
            free=free_bytes,
            fraction=config.memory_fraction,
            draft_flag=config.draft_model is not None,
        )
    full = with_context(shape, ctx)
    if full.pages is not None:
        if full.pages < min_pages(ctx):
            capacity = f"{full.pages} cache pages hold {full.pages * PAGE_SIZE:,} positions"
            fix = [f"cache_pages={min_pages(ctx)} or more", "a smaller ctx"]
            reason = ["A request at full length could never end."]
            raise UsageError(f"{capacity}, but the context is {ctx:,}", reason=reason, fix=fix)
        return full
    if fits_in_memory(full, usable_bytes):
        return full
    step = KV_BLOCK // PAGE_SIZE
    pages = find_largest(
        lambda n: fits_in_memory(replace(full, pages=n), usable_bytes), full.num_pages, step
    )
    return replace(full, pages=max(pages, min_pages(ctx)))


def memory_remedies(shape: EngineShape, usable: int | None, draft_flag: bool = False) -> list[str]:
    """Return a line of text for each option that would free memory, with the bytes that it frees.

    Sufficient ones come first, others only if they free a share worth naming.

    usable: bytes that are there; None where only the device knows: contexts and slots are halved.
    draft_flag: the drafter was requested by --draft-model, which other methods refuse.
    """
    now = measure_memory(shape).total
    options = []
    for flag, changed in [*_smaller_shapes(shape, usable), *_other_options(shape, draft_flag)]:
        frees = now - measure_memory(changed).total
        suffices = fits_in_memory(changed, usable)
        if suffices or frees >= MIN_NAMED_SHARE * now:
            alone = "" if suffices or usable is None else ", not enough alone"
            order = (0, frees) if suffices else (1, -frees)
            options.append((order, f"{flag}  (frees {format_size(frees)}{alone})"))
    return [words for _, words in sorted(options)]


def _smaller_shapes(shape: EngineShape, usable: int | None) -> Iterator[tuple[str, EngineShape]]:
    """Yield options, as text, with their shapes for fewer positions or slots: as many as fit, or
    half.
    """
    ctx = (
        find_largest(
            lambda n: fits_in_memory(with_context(shape, n), usable), shape.ctx - 1, PAGE_SIZE
        )
        or shape.ctx // 2
    )
    ctx = ctx // 1024 * 1024 if ctx >= 4096 else ctx  # a round number
    if 2 <= ctx < shape.ctx:
        yield f"--ctx {ctx}", with_context(shape, ctx)
    slots = (
        find_largest(lambda n: fits_in_memory(replace(shape, slots=n), usable), shape.slots - 1, 1)
        or shape.slots // 2
    )
    if slots:
        yield f"--concurrency {slots}", replace(shape, slots=slots)


def _other_options(shape: EngineShape, draft_flag: bool) -> Iterator[tuple[str, EngineShape]]:
    """Yield options, as text, with their shapes for another method, dtype or way of running."""
    if shape.draft is not None or shape.mtp is not None:
        without = ", without --draft-model" if draft_flag else ""
        ngram_draft_max = METHODS["ngram"].draft_max
        yield (
            f"--spec ngram{without}",
            replace(shape, draft=None, mtp=None, draft_max=ngram_draft_max),
        )
    elif shape.draft_max:
        yield "--spec off", replace(shape, draft_max=0)
    if shape.stores_distributions:
        yield "--verify coupled", replace(shape, stores_distributions=False)
    wide = (shape.form, shape.draft_form) == (WIDE, WIDE)
    models = (shape.target, shape.draft, shape.mtp.config if shape.mtp else None)
    stored = [model.quantization for model in models if model is not None]
    if wide and not any(stored):
        drafting = next((model for model in models[1:] if model is not None), shape.target)
        int8 = WeightForm("int8")
        int4, draft_int4 = (
            int4_form(model, shape.kernels, shape.dtype, shape.tp)
            for model in (shape.target, drafting)
        )
        for form, draft_form in ((int8, int8), (int4, draft_int4)):
            if not form.widened:
                changed = replace(shape, form=form, draft_form=draft_form)
                yield f"--quantize {form.kind}", changed
    if not shape.rounds_cache:
        yield "--kv int8", replace(shape, rounds_cache=True)
    if shape.dtype == "float32":
        yield "--dtype bfloat16", replace(shape, dtype="bfloat16")
    if shape.graphs:
        yield "--graphs off", replace(shape, graphs=False)


def memory_error(
    shape: EngineShape, device: str, free: int, fraction: float, draft_flag: bool = False
) -> ResourceError:
    """Return the error for a shape that takes more than `fraction` of a device's `free` bytes."""
    need = measure_memory(shape)
    usable = int(free * fraction)
    fix = memory_remedies(shape, usable, draft_flag)
    percent = -(-100 * need.total // max(1, free))
    if percent <= 100:
        gained = free * percent // 100 - usable
        fix.append(f"--memory-fraction {percent / 100:g}  (allows {format_size(gained)} more)")
    message = f"not enough memory on {device} for a context of {shape.ctx:,} tokens"
    share = f"{fraction:g} of the {format_size(free)} that are free"
    reason = [
        f"needed are {format_size(need.total)}, usable {format_size(usable)}: {share}",
        need.summary(),
    ]
    return ResourceError(
        message, reason=reason, fix=fix or ["a smaller model, or a device with more memory"]
    )


def longest_context(shape: EngineShape, usable: int) -> int:
    """Return the longest context with which a shape fits into `usable` bytes; 0 if none does."""
    return find_largest(
        lambda ctx: fits_in_memory(with_context(shape, ctx), usable),
        shape.target.max_positions,
        PAGE_SIZE,
    )


def with_context(shape: EngineShape, ctx: int) -> EngineShape:
    """Return the shape with another context, and the draft model's no longer than it."""
    return replace(shape, ctx=ctx, draft_ctx=min(shape.draft_ctx, ctx))

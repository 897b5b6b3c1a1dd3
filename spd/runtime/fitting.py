"""A wish cut to the memory there is: context and pages, before any weight is loaded. No torch here."""

from __future__ import annotations

from dataclasses import replace

from spd.errors import IncompatibleError, UsageError
from spd.formats.model_config import ModelConfig
from spd.formats.mtp_folder import MtpSource
from spd.runtime.config import EngineConfig
from spd.runtime.memory import (
    ATTENTION_BLOCK,
    AUTO_CTX,
    CHUNK,
    PAGE_SIZE,
    MemoryShape,
    at_context,
    fewest_pages,
    largest,
    measure,
    refusal,
)
from spd.runtime.page_table import NUM_RESERVED


def drafts_up_to(draft: ModelConfig | None, ctx: int) -> int:
    """Positions that a drafter can keep of a context; a head that reads the target's states follows it."""
    return ctx if draft is None or draft.eagle3 is not None else min(draft.max_positions, ctx)


def shape_of(
    config: EngineConfig,
    model: ModelConfig,
    draft: ModelConfig | None,
    dtype: str,
    kernels: str,
    graphs: bool,
    draft_max: int,
    on_cpu: bool,
    mtp: MtpSource | None = None,
    head_embedding: bool = False,
) -> MemoryShape:
    """What is asked for in numbers; an automatic context is as long as it may become."""
    if config.ctx is not None and config.ctx > model.max_positions:
        raise IncompatibleError(
            f"--ctx {config.ctx} is more than the model's {model.max_positions} positions",
            fix=[f"--ctx {model.max_positions}"],
        )
    ctx = config.ctx or max(2, min(model.max_positions, AUTO_CTX))
    return MemoryShape(
        target=model,
        draft=draft if draft_max else None,
        dtype=dtype,
        slots=config.slots,
        ctx=ctx,
        draft_ctx=min(drafts_up_to(draft, ctx), config.draft_ctx or ctx),
        draft_max=draft_max,
        chunk=CHUNK[kernels],
        kernels=kernels,
        graphs=graphs,
        on_cpu=on_cpu,
        pages=config.cache_pages,
        keep_laws=config.verify != "coupled",
        mtp=mtp if draft_max else None,
        head_embedding=head_embedding,
    )


def fitted(config: EngineConfig, shape: MemoryShape, device: str, free: int) -> MemoryShape:
    """The shape, with an automatic context and page number cut to what fits.

    Pages are cut first, down to what one request needs. Raises ResourceError if nothing fits.
    """
    usable = int(free * config.memory_fraction)

    def least(ctx: int) -> MemoryShape:
        return replace(at_context(shape, ctx), squeezed=shape.slots > 1)

    def fits(ctx: int) -> bool:
        return measure(least(ctx)).total <= usable

    ctx = shape.ctx if config.ctx else largest(fits, shape.ctx, PAGE_SIZE)
    if not ctx or not fits(ctx):
        smallest = least(ctx or min(shape.ctx, PAGE_SIZE))
        raise refusal(smallest, device, free, config.memory_fraction, bool(config.draft_model or config.mtp))
    whole = at_context(shape, ctx)
    if whole.pages is not None or measure(whole).total <= usable:
        return whole
    step = ATTENTION_BLOCK // PAGE_SIZE
    pages = largest(lambda n: measure(replace(whole, pages=n)).total <= usable, whole.num_pages, step)
    return replace(whole, pages=max(pages, fewest_pages(ctx)))


def check_pages(shape: MemoryShape) -> None:
    if shape.num_pages - NUM_RESERVED < fewest_pages(shape.ctx):
        raise UsageError(
            f"{shape.pages} cache pages hold {(shape.pages or 0) * PAGE_SIZE:,} positions, "
            f"but the context is {shape.ctx:,}",
            reason=["A request at full length could never end."],
            fix=[f"cache_pages={fewest_pages(shape.ctx)} or more", "a smaller ctx"],
        )

"""How many ranks hold the target and the drafter. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from spd.errors import IncompatibleError, UsageError
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.runtime.models import family_layout
from spd.runtime.models.destinations import Shard
from spd.runtime.models.weights import streamed_tables
from spd.runtime.plan.config import EngineConfig

MOST_RANKS = 64


def divide(
    wishes: EngineConfig, model: ModelConfig, draft: ModelConfig | None, mtp: MtpSource | None
) -> tuple[int, str]:
    """Ranks of each group that runs the drafter, of those that share the target, and why so many.

    Raises IncompatibleError where a model cannot be divided so, UsageError where nothing is to be divided.
    """
    tp, draft_tp = wishes.tp, wishes.draft_tp
    if tp == 1:
        return 1, "one rank"
    _check("--tp", tp, model, "the target")
    drafter = draft if mtp is None else mtp.config
    if drafter is None:
        if draft_tp is not None:
            raise UsageError(
                f"--draft-tp {draft_tp} says how many ranks share a drafter, and here no model drafts",
                fix=["leave --draft-tp out", "--spec draft --draft-model FOLDER"],
            )
        return 1, "nothing drafts with a model"
    if draft_tp is not None:
        _check("--draft-tp", draft_tp, drafter, "the drafter")
        return draft_tp, "asked for"
    if mtp is not None and tp in possible_sizes(drafter, [tp]):
        return tp, "as the target, whose tables an MTP head then shares"
    return 1, "a small model is read sooner than its parts are exchanged"


def possible_sizes(config: ModelConfig, sizes: Iterable[int]) -> list[int]:
    """Those numbers of ranks among which a model can be divided."""
    layout, found = family_layout(config), []
    ids = streamed_tables(config, layout)[0].shape[0]  # that logits are made for
    for size in sizes:
        with suppress(IncompatibleError):
            if size > 1:
                Shard(0, size).ids(ids)
                for kind in set(layout.layers):
                    kind.sharded(Shard(0, size))
            found.append(size)
    return found


def _check(flag: str, ranks: int, config: ModelConfig, what: str) -> None:
    possible = possible_sizes(config, range(1, MOST_RANKS + 1))
    if ranks in possible:
        return
    reason = f"{config.num_heads} heads"
    if config.latent is None:
        reason += f", {config.num_kv_heads} of keys and values"
    if config.delta is not None:
        reason += f", {config.delta.value_heads} recurrent value heads"
    inner = [config.intermediate_size, *([config.experts.intermediate_size] if config.experts else [])]
    raise IncompatibleError(
        f"{flag} {ranks} does not divide {what}",
        reason=[f"{reason}, MLPs {' and '.join(f'{size:,}' for size in inner)} wide"],
        fix=[f"{flag} {n}" for n in possible[:6]],
        code="tensor_parallel",
    )

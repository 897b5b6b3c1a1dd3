"""How many ranks hold the target and the drafter: checked, or chosen with a reason. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from spd.errors import IncompatibleError, UsageError
from spd.formats.model_config import ModelConfig
from spd.formats.mtp import MtpSource
from spd.runtime.models import family_layout
from spd.runtime.models.mtp_weights import module_layer
from spd.runtime.models.weight_form import DTYPE_BYTES
from spd.runtime.models.weights import streamed_tables
from spd.runtime.plan.rank_cost import (
    DraftCost,
    choose_group,
    layer_bytes,
    possible_sizes,
    speeds_of,
    streamed_bytes,
)

MOST_RANKS = 64


@dataclass(frozen=True)
class Division:
    """Ranks that share the target, ranks of each group that runs the drafter, and why so many."""

    tp: int = 1
    draft_tp: int = 1
    reason: str = "one rank"


def divide(
    tp: int,
    draft_tp: int | None,
    model: ModelConfig,
    draft: ModelConfig | None,
    mtp: MtpSource | None,
    dtype: str,
    device: str,
) -> Division:
    """Among how many ranks the models are divided. Raises where that cannot be."""
    if tp == 1:
        return Division()
    _check("--tp", tp, model, "the target")
    if draft is None and mtp is None:
        if draft_tp is not None:
            raise UsageError(
                f"--draft-tp {draft_tp} says how many ranks share a drafter, and here no model drafts",
                fix=["leave --draft-tp out", "--spec draft --draft-model FOLDER"],
            )
        return Division(tp, 1, "nothing drafts with a model")
    drafter = mtp.config if mtp is not None else draft
    assert drafter is not None
    if draft_tp is not None:
        _check("--draft-tp", draft_tp, drafter, "the drafter")
        return Division(tp, draft_tp, "asked for")
    width = DTYPE_BYTES[dtype]
    if mtp is not None:
        layer = module_layer(mtp.config, mtp.layout.family)
        hidden = drafter.hidden_size
        head = (drafter.vocab_size + 2 * hidden) * hidden * width
        cost = DraftCost(hidden, 1, layer_bytes(layer, width) + head, width)
    else:
        cost = DraftCost(drafter.hidden_size, drafter.num_layers, streamed_bytes(drafter, width), width)
    possible = possible_sizes(family_layout(drafter).layers, _ids(drafter), tp)
    return Division(tp, *choose_group(cost, speeds_of(device), tp, possible))


def _ids(config: ModelConfig) -> int:
    """Ids that a model makes logits for."""
    return streamed_tables(config, family_layout(config))[0].shape[0]


def _check(flag: str, ranks: int, config: ModelConfig, what: str) -> None:
    layers, ids = family_layout(config).layers, _ids(config)
    possible = [n for n in range(2, MOST_RANKS + 1) if n in possible_sizes(layers, ids, n)]
    if ranks == 1 or ranks in possible:
        return
    reason = f"{config.num_heads} heads, {config.num_kv_heads} of keys and values"
    if config.latent is not None:
        reason = f"{config.num_heads} heads"
    inner = [config.intermediate_size, *([config.experts.intermediate_size] if config.experts else [])]
    raise IncompatibleError(
        f"{flag} {ranks} does not divide {what}",
        reason=[f"{reason}, MLPs {' and '.join(f'{size:,}' for size in inner)} wide"],
        fix=[f"{flag} {n}" for n in (1, *possible)[:6]],
        code="tensor_parallel",
    )

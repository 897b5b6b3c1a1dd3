"""Whatever can be refused for one request alone, refused before it waits for anything."""

from __future__ import annotations

from spd.errors import IncompatibleError, UsageError
from spd.runtime.plan import EnginePlan
from spd.runtime.request import Request


def check_request(
    request: Request, plan: EnginePlan, vocab_size: int, usable_vocab: int, *, has_tokenizer: bool
) -> None:
    """Raise UsageError or IncompatibleError for a request that this engine cannot run.

    vocab_size ids have an embedding, usable_vocab of them can be drawn.
    """
    params, length = request.params, len(request.prompt_ids)
    if not length:
        raise UsageError("the prompt has no tokens", reason=["a first token is needed to continue from"])
    wrong = next((t for t in request.prompt_ids if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise UsageError(f"prompt token id {wrong} is out of range", reason=[f"valid: 0 to {vocab_size - 1}"])
    if length >= plan.ctx:
        raise IncompatibleError(
            f"prompt is {length:,} tokens but the context is {plan.ctx:,}",
            fix=[f"--ctx N above {length}", "--overflow truncate-left to drop the oldest tokens"],
            code="context_overflow",
        )
    for token_id in (*params.stop_token_ids, *(token for token, _ in params.logit_bias)):
        if token_id >= usable_vocab:
            raise UsageError(
                f"token id {token_id} is out of range", reason=[f"valid: 0 to {usable_vocab - 1}"]
            )
    if params.stop and not has_tokenizer:
        raise IncompatibleError("stop strings need a tokenizer, and the model folder has no tokenizer.json")
    if request.spans and sum(n for _, n in request.spans) != length:
        raise UsageError("the prompt's spans do not add up to its length")
    if any(origin not in ("prompt", "generated") or n < 0 for origin, n in request.spans):
        raise UsageError("a span is neither prompt nor generated, or its length is negative")

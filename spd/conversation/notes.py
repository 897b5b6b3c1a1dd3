"""Notes for the user about limits of a run, before it begins and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spd.conversation.prompt import THINKING_SWITCH

if TYPE_CHECKING:
    from spd.conversation.vocabulary import Vocabulary
    from spd.runtime import EngineInfo
    from spd.runtime.engine.request import Request, RequestOutput

LOOP_TOKENS = 200
"""Tokens at the end of a reply that are searched for a repetition."""
LOOP_PERIOD = 100
"""The longest repetition that is found, in tokens: twice as many are compared."""

UNCONSTRAINED_CALLS = "calls of tools are not held to their schemas"
"""The beginning of a note, before the reason why no grammar can constrain the calls."""


def notes_before_run(
    info: EngineInfo, think: str, vocabulary: Vocabulary, request: Request | None
) -> list[str]:
    """Return notes about an engine and the option `think`, and about a request if there is one."""
    notes: list[str] = []
    if request is not None and (max_tokens := request.params.max_tokens) is not None:
        room = info.ctx - len(request.prompt_ids)
        if max_tokens > room:
            notes.append(
                f"the context leaves room for {room:,} tokens, fewer than -n {max_tokens:,}"
            )
    if "multiplied out to" in (reason := str(info.plan.get("weights_reason", ""))):
        notes.append(f"weights: {reason}")
    if "no C compiler" in info.kernels_reason:
        notes.append(f"this is slow: {info.kernels_reason}")
    if (note := thinking_note(think, vocabulary)) is not None:
        notes.append(note)
    if info.verify != "coupled" and info.spec != "off":
        words = "texts are as likely as without speculation, not the same"
        notes.append(f"--verify {info.verify}: {words}; {info.draft_max} drafts a round")
    return notes


def thinking_note(think: str, vocabulary: Vocabulary) -> str | None:
    """Return a note if `think` switches thinking and the chat template has no such switch; else
    None.
    """
    template = vocabulary.template
    if think in ("on", "off") and template is not None and template.thinking_switch is None:
        return f"this chat template has no {THINKING_SWITCH}: thinking cannot be switched on or off"
    return None


def loop_note(reply: RequestOutput) -> str | None:
    """Return a note if a reply that its limit ended repeats itself; else None."""
    period = loop_period(reply.token_ids)
    if reply.finish_reason != "length" or period is None:
        return None
    same = "one token" if period == 1 else f"the same {period} tokens"
    ways = "a smaller -n ends it earlier, --temperature 0.8 may prevent it"
    return f"the last {LOOP_TOKENS} tokens repeat {same}; {ways}"


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Return the period with which the last LOOP_TOKENS token ids repeat; None where they do
    not.
    """
    last = list(token_ids[-LOOP_TOKENS:])
    if len(last) < LOOP_TOKENS:
        return None
    periods = range(1, LOOP_PERIOD + 1)
    return next((period for period in periods if last[period:] == last[:-period]), None)

"""What a user may not expect of a run, in words, before it begins and at its end."""

from __future__ import annotations

from collections.abc import Sequence

from spd.conversation.prompt import SWITCH
from spd.conversation.vocabulary import Vocabulary
from spd.runtime import EngineInfo
from spd.runtime.engine.request import Request, RequestOutput

LOOP_TOKENS = 200
"""Tokens at the end of a reply that are searched for a repetition."""
LOOP_PERIOD = 100
"""The longest repetition that is found, in tokens: twice as many are compared."""

UNCONSTRAINED_CALLS = "calls of tools are not held to their schemas"
"""What stands before the reason where no grammar can hold them."""


def notes_before(
    info: EngineInfo, think: str, vocabulary: Vocabulary, request: Request | None
) -> list[str]:
    """Return notes about an engine and the wish to think; about one request, too, where there is one."""
    notes: list[str] = []
    if request is not None and (wanted := request.params.max_tokens) is not None:
        room = info.ctx - len(request.prompt_ids)
        if wanted > room:
            notes.append(f"the context leaves room for {room:,} tokens, fewer than -n {wanted:,}")
    if "no C compiler" in info.kernels_reason:
        notes.append(f"this is slow: {info.kernels_reason}")
    if (note := thinking_note(think, vocabulary)) is not None:
        notes.append(note)
    if info.verify != "coupled" and info.spec != "off":
        words = "texts are as likely as without speculation, not the same"
        notes.append(f"--verify {info.verify}: {words}; {info.draft_max} drafts a round")
    return notes


def thinking_note(think: str, vocabulary: Vocabulary) -> str | None:
    """Return a note where a chat template cannot be asked for thinking or for none, and is asked."""
    template = vocabulary.template
    if think in ("on", "off") and template is not None and template.thinking_switch is None:
        return f"this chat template has no {SWITCH}: thinking cannot be switched on or off"
    return None


def loop_note(reply: RequestOutput) -> str | None:
    """Return a note where a reply was cut by its limit while it repeated itself; else None."""
    period = loop_period(reply.token_ids)
    if reply.finish_reason != "length" or period is None:
        return None
    same = "one token" if period == 1 else f"the same {period} tokens"
    ways = "a smaller -n ends it earlier, --temperature 0.8 may prevent it"
    return f"the last {LOOP_TOKENS} tokens repeat {same}; {ways}"


def loop_period(token_ids: Sequence[int]) -> int | None:
    """Return the period with which the last LOOP_TOKENS token ids repeat; None where they do not."""
    last = list(token_ids[-LOOP_TOKENS:])
    if len(last) < LOOP_TOKENS:
        return None
    periods = range(1, LOOP_PERIOD + 1)
    return next((period for period in periods if last[period:] == last[:-period]), None)

"""What a user may not expect of a run, in words, before it begins."""

from __future__ import annotations

from spd.conversation.prompt import SWITCH
from spd.conversation.vocabulary import Vocabulary
from spd.runtime import EngineInfo
from spd.runtime.engine.request import Request


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
    if think in ("on", "off") and template is not None and template.switch is None:
        return f"this chat template has no {SWITCH}: thinking cannot be switched on or off"
    return None

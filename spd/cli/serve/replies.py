"""Replies in the API's form: what each event brings a choice, and the objects made of it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spd.cli.serve.calls import MARKS, CallParser
from spd.cli.serve.tools import MISTRAL, Tools
from spd.cli.text.report import logprob_entry
from spd.cli.text.structured import ThinkingSplitter

if TYPE_CHECKING:
    from spd.cli.serve.wishes import Wish
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import EnginePlan, Event, RequestMetrics
    from spd.runtime.engine.request import TokenLogprob

IMPOSSIBLE = -9999.0
"""What the API says for the logarithm of nothing."""
LEGACY_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"


@dataclass
class Delta:
    """What one event adds to a choice."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: tuple[TokenLogprob, ...] = ()

    def message(self) -> dict[str, Any]:
        """It as the API's `delta`."""
        said: dict[str, Any] = {}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.content or not (self.reasoning or self.calls):
            said["content"] = self.content
        if self.calls:
            said["tool_calls"] = self.calls
        return said


class Choice:
    """One reply while it grows."""

    def __init__(self, index: int, inside: bool | None, wish: Wish, tokenizer: Tokenizer) -> None:
        self.index, self._tokenizer, self._chat = index, tokenizer, wish.chat
        self.tools: Tools | None = wish.tools
        self._splitter = ThinkingSplitter(inside)
        self._parser = None if wish.tools is None else CallParser(wish.tools)
        names = tokenizer.special_tokens if self._parser is not None else {}
        self._marks = {names[mark]: mark for mark in MARKS if mark in names}
        self.content, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.tokens = self.reasoning_tokens = 0

    def take(self, event: Event) -> Delta:
        """Add an event; returns what is new."""
        self.tokens += len(event.token_ids)
        if self._chat and self._splitter.thinking:
            self.reasoning_tokens += len(event.token_ids)
        final = event.finish_reason is not None
        delta = Delta(logprobs=event.logprobs)
        for thinking, text in self._splitter.feed(self._marked(event), final=final):
            if thinking:
                delta.reasoning += text
            else:
                self._answer(delta, text)
        if final and self._parser is not None:
            self._answer(delta, "", final=True)
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.logprobs += event.logprobs
        if final:
            self.reason, self.error = event.finish_reason, event.error
        return delta

    def _marked(self, event: Event) -> str:
        """An event's text, with the special tokens that calls are written with."""
        text: str = event.text
        ids = event.token_ids
        for at in range(len(ids) - 1, -1, -1) if self._marks else ():
            if mark := self._marks.get(ids[at]):
                behind = self._tokenizer.bytes_of(ids[at + 1 :]).decode("utf-8", "ignore")
                place = max(0, len(event.text) - len(behind))
                text = f"{text[:place]}{mark}{text[place:]}"
        return text

    def _answer(self, delta: Delta, text: str, *, final: bool = False) -> None:
        if self._parser is None:
            delta.content += text
            return
        for piece in self._parser.feed(text, final=final):
            if piece.call is None:
                delta.content += piece.text
            elif piece.name is not None:
                function = {"name": piece.name, "arguments": ""}
                call = {"id": self._call_id(), "type": "function", "function": function}
                self.calls.append({**call, "function": dict(function)})
                delta.calls.append({"index": piece.call, **call})
            else:
                self.calls[piece.call]["function"]["arguments"] += piece.text
                delta.calls.append({"index": piece.call, "function": {"arguments": piece.text}})

    def _call_id(self) -> str:
        if self.tools is not None and self.tools.form == MISTRAL:  # whose templates want nine characters
            return "".join(secrets.choice(LEGACY_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    @property
    def finish_reason(self) -> str | None:
        """How it ended, as the API says it."""
        if self.reason == "stop" and self.calls and (self.tools is None or self.tools.named is None):
            return "tool_calls"
        return "stop" if self.reason == "abort" else self.reason

    def whole(self) -> dict[str, Any]:
        """The choice of a chat completion."""
        content: str | None = self.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning.strip("\n")
        if self.calls:
            message |= {"content": self.content.strip() or None, "tool_calls": self.calls}
        return {"index": self.index, "message": message, "finish_reason": self.finish_reason}

    def chat_logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities as chat completions show them."""
        shown = []
        for entry in entries:
            said = logprob_entry(entry, self._tokenizer)
            top = [_shown(one) for one in said.pop("top")]
            shown.append({**_shown(said), "top_logprobs": top})
        return {"content": shown, "refusal": None}

    def text_logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Log-probabilities as completions show them; `offset` is that of the first token's text."""
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        shown["text_offset"] = []
        for entry in entries:
            said = _shown(logprob_entry(entry, self._tokenizer))
            shown["tokens"].append(said["token"])
            shown["token_logprobs"].append(said["logprob"])
            shown["top_logprobs"].append(
                {one["token"]: max(one["logprob"], IMPOSSIBLE) for one in said["top"]}
            )
            shown["text_offset"].append(offset)
            offset += len(said["token"])
        return shown


def _shown(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry without its id, of a logarithm that JSON can hold."""
    shown = {name: value for name, value in entry.items() if name != "token_id"}
    return {**shown, "logprob": max(entry["logprob"], IMPOSSIBLE)}


def usage(each: Sequence[RequestMetrics], choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Tokens of a call; a prompt counts once for all of its choices."""
    prompt = sum(one.prompt_tokens for one in each[::n])
    completion = sum(one.completion_tokens for one in each)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in each[::n])},
        "completion_tokens_details": {
            "reasoning_tokens": sum(one.reasoning_tokens for one in choices),
            "draft_tokens": sum(one.draft_n for one in each),
            "accepted_draft_tokens": sum(one.draft_n_accepted for one in each),
        },
    }


def figures(each: Sequence[RequestMetrics], plan: EnginePlan) -> dict[str, Any]:
    """Times and acceptance of a call's first choice, under the names that other tools read."""
    first = each[0]
    speculation = first.speculative_decoding(plan.spec, plan.shape.draft_max)
    return {"timings": first.timings(), "metrics": {"speculative_decoding": speculation}}

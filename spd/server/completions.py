"""OpenAI's completions API: raw prompts, scored on request, and how it tells a reply."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spd.conversation.fields import (
    FLAG,
    TEXT,
    array_of,
    integer,
    refuse,
    strict_object,
)
from spd.conversation.fill_in import fill_in_ends
from spd.conversation.prompt import Prompt
from spd.conversation.reply import PartDelta, ReplyBuilder
from spd.conversation.sampling_fields import IDS
from spd.runtime.engine.request import TokenLogprob
from spd.runtime.round.sampling_params import MAX_LOGPROBS, MAX_STOP_IDS, MAX_TOKENS
from spd.server.api_request import (
    MAX_REPLIES,
    SHARED_FIELDS,
    ApiRequest,
    Generation,
    sampling_params,
    shared_fields,
)
from spd.server.chat_completions import ChatReply, finite_logprobs
from spd.server.replies import Reply

if TYPE_CHECKING:
    from spd.conversation.settings import PreparedRequest, Settings
    from spd.runtime import Event
    from spd.server.service import Service

MAX_PROMPTS = 128
DEFAULT_TOKENS = 16
"""Tokens of a reply where the body has no limit: the API's own number."""


def _prompts(value: Any, name: str) -> tuple[Prompt, ...]:
    """One prompt or several, as text or as token ids."""
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    return tuple(array_of(_prompt, MAX_PROMPTS)(value if several else [value], name))


def _prompt(value: Any, name: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(text=value)
    ids = IDS(value, name)
    return Prompt(ids=ids) if ids else refuse(name, "expected a text or token ids")


COMPLETION_FIELDS = {
    **SHARED_FIELDS,
    "prompt": _prompts,
    "suffix": TEXT,
    "echo": FLAG,
    "logprobs": integer(0, MAX_LOGPROBS),
    "max_tokens": integer(0, MAX_TOKENS),
    "best_of": integer(1, MAX_REPLIES),
}
_completion = strict_object(COMPLETION_FIELDS, "prompt")


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """A request that continues raw prompts."""

    echo: bool = False
    """Whether the prompt stands before the reply."""
    shows_reply: bool = True
    """Whether the reply is shown; a limit of no tokens asks for scores of the prompt alone."""


def read_completion(value: Any, settings: Settings) -> Generation:
    """Return what a completion's body asks for. Raises FieldError and ApiError."""
    body = {"max_tokens": DEFAULT_TOKENS, **_completion(value, "")}
    shared = shared_fields(body)
    if body.get("best_of", body.get("n", 1)) != body.get("n", 1):
        refuse("best_of", "replies are not ranked: it has to be the same number as `n`")
    prompts = body["prompt"]
    sampling = {**shared["sampling"], "max_tokens": max(1, body["max_tokens"])}
    if suffix := body.get("suffix"):
        if any(prompt.ids is not None for prompt in prompts):
            refuse("suffix", "it needs a prompt of text")
        if body.get("echo"):
            refuse("suffix", "it cannot be used together with `echo`")
        prompts = tuple(dataclasses.replace(prompt, suffix=suffix) for prompt in prompts)
        ends = fill_in_ends(settings.vocabulary.need_tokenizer())
        stops = dict.fromkeys((*body.get("stop_token_ids", ()), *ends))
        sampling["stop_token_ids"] = tuple(stops)[:MAX_STOP_IDS]
    logprobs = body.get("logprobs")
    request = CompletionRequest(
        **{**shared, "sampling": sampling},
        logprobs=logprobs,
        echo=body.get("echo", False),
        shows_reply=body["max_tokens"] > 0,
    )
    params = sampling_params(sampling, settings, logprobs)
    scored = logprobs if request.echo else None
    return Generation(request, prompts, params, prompt_logprobs=scored)


class TextOffsets:
    """Where each token's text begins in a text, in characters."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def end(self) -> int:
        """Characters so far."""
        return self._at

    def place(self, data: bytes) -> int:
        """Return where the text of the next token begins. data: its bytes."""
        at = self._at
        self._at += len(self._decoder.decode(data))
        return at


class CompletionReply(ChatReply):
    """As completions."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, service: Service, generation: Generation, prepared: Sequence[PreparedRequest]
    ) -> None:
        super().__init__(service, generation, prepared)
        request = generation.request
        assert isinstance(request, CompletionRequest)
        self._shows_reply = request.shows_reply
        self._prompt_ids = [each.request.prompt_ids for each in prepared]
        self._offsets = [TextOffsets() for _ in prepared]
        self._scores: dict[int, tuple[TokenLogprob, ...]] = {}
        """Of the prompts' tokens but the first, by number of the choice."""
        self._unechoed = {*range(len(prepared))} if request.echo else set[int]()
        """Choices of a stream whose prompt is still to be shown."""

    def begin(self, cached: int) -> Iterator[bytes]:
        """Show nothing: a completion has no role."""
        return Reply.begin(self, cached)

    def _heard(self, index: int, event: Event) -> Event:
        """Keep scores; leave out the token that is decoded where none is asked for."""
        self._scores.setdefault(index, event.prompt_logprobs)
        if self._shows_reply:
            return event
        reason = "length" if event.finish_reason == "stop" else event.finish_reason
        return event._replace(token_ids=(), text="", logprobs=(), drafted=(), finish_reason=reason)

    def grow(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """Show the prompt first where it is to be echoed."""
        if choice.index in self._unechoed:
            self._unechoed.discard(choice.index)
            yield self._chunk(
                choice, text=self._prompt(choice), logprobs=self._prompt_logprobs(choice)
            )
        yield from super().grow(choice, event, grown)

    def _added(self, choice: ReplyBuilder, grown: Sequence[PartDelta]) -> dict[str, Any]:
        return {"text": "".join(text for _, text, _ in grown)}

    def _all(self, choice: ReplyBuilder) -> dict[str, Any]:
        return {"text": choice.text_of("text")}

    def _ended(self, choice: ReplyBuilder) -> dict[str, Any]:
        scores = self._prompt_logprobs(choice) if choice.index in self._unechoed else None
        ended = super()._ended(choice)
        if choice.index in self._unechoed:
            ended["text"] = self._prompt(choice) + ended["text"]
        if scores is not None and ended["logprobs"] is not None:
            ended["logprobs"] = {name: scores[name] + ended["logprobs"][name] for name in scores}
        return ended

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        prompt, cached, completion, reasoning = super()._counts
        return prompt, cached, completion if self._shows_reply else 0, reasoning

    def _prompt(self, choice: ReplyBuilder) -> str:
        """Return the prompt of a choice as it was sent, or as what its token ids stand for."""
        prompt = self._generation.prompts[choice.index // self._request.n]
        if prompt.text is not None:
            return prompt.text
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        return tokenizer.decode(self._prompt_ids[choice.index], skip_special=False)

    def _prompt_logprobs(self, choice: ReplyBuilder) -> dict[str, list[Any]] | None:
        """Return the scores of a prompt's tokens, the first of which has none."""
        if self._generation.params.logprobs is None:
            return None
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        ids = self._prompt_ids[choice.index]
        text = self._prompt(choice)
        first = TokenLogprob(ids[0], 0.0)
        entries = finite_logprobs((first, *self._scores[choice.index]), tokenizer)
        names = {token: name for name, token in tokenizer.special_tokens.items()}
        offsets = self._offsets[choice.index]
        places: list[int] = []
        for entry in entries:
            data = bytes(entry["bytes"])
            name = names.get(entry["token_id"], "")
            at = offsets.end
            if name and text.startswith(name, at):
                entry["token"] = name
                data = name.encode()
            elif at == 0 and data.startswith(b" ") and not text.startswith(" "):
                data = data[1:]  # the blank that a vocabulary of words puts before a text
            places.append(offsets.place(data))
        told = _in_columns(entries, places)
        told["token_logprobs"][0] = None
        told["top_logprobs"][0] = None
        return told

    def _logprobs(
        self, choice: ReplyBuilder, entries: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        if self._generation.params.logprobs is None:
            return None
        shown = finite_logprobs(entries, self._service.settings.vocabulary.need_tokenizer())
        offsets = self._offsets[choice.index]
        return _in_columns(shown, [offsets.place(bytes(entry["bytes"])) for entry in shown])


def _in_columns(
    entries: Sequence[Mapping[str, Any]], places: Sequence[int]
) -> dict[str, list[Any]]:
    """Return log-probabilities in the API's form: a list of each fact."""
    likeliest = [{one["token"]: one["logprob"] for one in entry["top"]} for entry in entries]
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": likeliest,
        "text_offset": [*places],
    }

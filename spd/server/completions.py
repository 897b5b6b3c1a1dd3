"""OpenAI's completions API: raw prompts, scored on request, and replies."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from spd.conversation.fields import (
    FLAG,
    TEXT,
    array_of,
    integer,
    object_of,
    refuse,
)
from spd.conversation.fill_in import fill_in_ends
from spd.conversation.logprobs import LogprobEntry
from spd.conversation.prompt import Prompt
from spd.conversation.reply import PartDelta, ReplyBuilder
from spd.conversation.sampling_fields import TOKEN_IDS
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
from spd.server.replies import Reply, TokenCounts

if TYPE_CHECKING:
    from spd.conversation.settings import PreparedRequest, Settings
    from spd.runtime import Event, Json
    from spd.server.service import Service

MAX_PROMPTS = 128
"""Prompts of one request."""
DEFAULT_MAX_TOKENS = 16
"""Tokens of a reply if the body has no limit: the API's own default."""


def _check_prompts(value: Json, name: str) -> tuple[Prompt, ...]:
    """Return one prompt or several, as text or as token ids."""
    has_several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    return array_of(_check_prompt, MAX_PROMPTS)(value if has_several else [value], name)


def _check_prompt(value: Json, name: str) -> Prompt:
    """Return one prompt. Raises FieldError."""
    if isinstance(value, str):
        return Prompt(text=value)
    ids = TOKEN_IDS(value, name)
    return Prompt(ids=ids) if ids else refuse(name, "expected a text or token ids")


COMPLETION_FIELDS = {
    **SHARED_FIELDS,
    "prompt": _check_prompts,
    "suffix": TEXT,
    "echo": FLAG,
    "logprobs": integer(0, MAX_LOGPROBS),
    "max_tokens": integer(0, MAX_TOKENS),
    "best_of": integer(1, MAX_REPLIES),
}
_check_body = object_of(COMPLETION_FIELDS, "prompt")
"""Checks and returns the body of `/v1/completions`."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """A request that continues raw prompts."""

    echo: bool = False
    """True if the reply begins with the prompt."""
    shows_reply: bool = True
    """False if the reply is left out: a limit of no tokens requests scores of the prompt alone."""


def read_completion(value: Json, settings: Settings) -> Generation:
    """Return the generation that a completion's body requests. Raises FieldError and ApiError."""
    body = {"max_tokens": DEFAULT_MAX_TOKENS, **_check_body(value, "")}
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
    """The position of each token's text in a text, in characters."""

    def __init__(self) -> None:
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def end(self) -> int:
        """Return the number of characters so far."""
        return self._position

    def advance(self, data: bytes) -> int:
        """Move behind the next token's text and return its position. data: the token's bytes."""
        at = self._position
        self._position += len(self._decoder.decode(data))
        return at


class LogprobColumns(TypedDict):
    """Log-probabilities as completions write them: an array for each field, an item for each
    token.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionReply(ChatReply):
    """A reply in the form of completions."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, service: Service, generation: Generation, prepared: Sequence[PreparedRequest]
    ) -> None:
        super().__init__(service, generation, prepared)
        request = generation.request
        assert isinstance(request, CompletionRequest)
        self._shows_reply = request.shows_reply
        self._prompt_ids = [prepared_request.request.prompt_ids for prepared_request in prepared]
        self._offsets = [TextOffsets() for _ in prepared]
        self._scores: dict[int, tuple[TokenLogprob, ...]] = {}
        """Log-probabilities of the prompts' tokens but the first, by number of the choice."""
        self._unechoed_choices = {*range(len(prepared))} if request.echo else set[int]()
        """Choices of a stream whose prompt is still to be sent."""

    def start_chunks(self, cached: int) -> Iterator[bytes]:
        """Yield nothing: a completion has no role."""
        return Reply.start_chunks(self, cached)

    def _visible_event(self, index: int, event: Event) -> Event:
        """Store the prompt's scores; return the event, without tokens if the reply is left out."""
        self._scores.setdefault(index, event.prompt_logprobs)
        if self._shows_reply:
            return event
        reason = "length" if event.finish_reason == "stop" else event.finish_reason
        return event._replace(token_ids=(), text="", logprobs=(), drafted=(), finish_reason=reason)

    def event_chunks(
        self, choice: ReplyBuilder, event: Event, grown: Sequence[PartDelta]
    ) -> Iterator[bytes]:
        """Yield the chunks of an event, first the prompt if the request echoes it."""
        if choice.index in self._unechoed_choices:
            self._unechoed_choices.discard(choice.index)
            yield self._choice_chunk(
                choice, text=self._prompt_text(choice), logprobs=self._prompt_logprobs(choice)
            )
        yield from super().event_chunks(choice, event, grown)

    def _delta_fields(self, choice: ReplyBuilder, grown: Sequence[PartDelta]) -> dict[str, object]:
        """Return the text that an event added, as a field of the choice."""
        return {"text": "".join(text for _, text, _ in grown)}

    def _reply_fields(self, choice: ReplyBuilder) -> dict[str, object]:
        """Return the text of a complete choice, as a field of it."""
        return {"text": choice.text_of("text")}

    def _choice_fields(self, choice: ReplyBuilder) -> dict[str, object]:
        """Return a complete choice, with its prompt if the request echoes it."""
        fields = super()._choice_fields(choice)
        if choice.index in self._unechoed_choices:
            fields["text"] = self._prompt_text(choice) + choice.text_of("text")
        return fields

    def _full_logprobs(self, choice: ReplyBuilder) -> LogprobColumns | None:
        """Return the log-probabilities of a choice, first those of its prompt if it is echoed."""
        is_echoed = choice.index in self._unechoed_choices
        prompt = self._prompt_logprobs(choice) if is_echoed else None  # its offsets come first
        reply = self._logprobs(choice, choice.logprobs)
        if prompt is None or reply is None:
            return reply
        return {
            "tokens": prompt["tokens"] + reply["tokens"],
            "token_logprobs": prompt["token_logprobs"] + reply["token_logprobs"],
            "top_logprobs": prompt["top_logprobs"] + reply["top_logprobs"],
            "text_offset": prompt["text_offset"] + reply["text_offset"],
        }

    @property
    def _token_counts(self) -> TokenCounts:
        """Return the tokens of all choices; none of a reply that is left out."""
        counts = super()._token_counts
        return counts if self._shows_reply else counts._replace(completion=0)

    def _prompt_text(self, choice: ReplyBuilder) -> str:
        """Return the prompt of a choice as it was sent, or the text of its token ids."""
        prompt = self._generation.prompts[choice.index // self._request.n]
        if prompt.text is not None:
            return prompt.text
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        return tokenizer.decode(self._prompt_ids[choice.index], skip_special=False)

    def _prompt_logprobs(self, choice: ReplyBuilder) -> LogprobColumns | None:
        """Return the log-probabilities of an echoed prompt's tokens, of which the first has none.

        None if the request wants no log-probabilities. To be called once, behind the choice's first
        event and before `_logprobs`: it moves the choice's offsets behind the prompt.
        """
        if self._generation.params.logprobs is None:
            return None
        tokenizer = self._service.settings.vocabulary.need_tokenizer()
        ids = self._prompt_ids[choice.index]
        text = self._prompt_text(choice)
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
                data = data[1:]  # the blank that such a vocabulary puts before a text
            places.append(offsets.advance(data))
        columns = _in_columns(entries, places)
        columns["token_logprobs"][0] = None
        columns["top_logprobs"][0] = None
        return columns

    def _logprobs(
        self, choice: ReplyBuilder, entries: Sequence[TokenLogprob]
    ) -> LogprobColumns | None:
        """Return the log-probabilities of a reply's next tokens; None if the request wants none.

        Moves the choice's offsets behind them.
        """
        if self._generation.params.logprobs is None:
            return None
        finite = finite_logprobs(entries, self._service.settings.vocabulary.need_tokenizer())
        offsets = self._offsets[choice.index]
        return _in_columns(finite, [offsets.advance(bytes(entry["bytes"])) for entry in finite])


def _in_columns(entries: Sequence[LogprobEntry], places: Sequence[int]) -> LogprobColumns:
    """Return log-probabilities in the API's form. places: the positions of the tokens' texts."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {token["token"]: token["logprob"] for token in entry["top"]} for entry in entries
        ],
        "text_offset": [*places],
    }

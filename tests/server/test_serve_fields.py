"""What fields ask for is done: limits, stop strings, schemas, usage in streams, scores of
prompts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from spd.server import chat_completions
from spd.server.api_request import PASSED_OVER
from tests.server.conftest import MESSAGES, SLOTS, Served

CHAT = "/v1/chat/completions"
RAW = "/v1/completions"
GREEDY = {"temperature": 0}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("limits", [(2, 9), (9, 2)])
def test_the_smaller_of_two_limits_holds(
    served: Served, order: int, limits: tuple[int, int]
) -> None:
    names = ("max_tokens", "max_completion_tokens")
    pairs = list(zip(names, limits, strict=True))[::order]
    answer = served.ask(CHAT, {"messages": MESSAGES, **dict(pairs)})
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["name", "path"], "Join two or more ", "path"),
        (["oin", "Join"], "", "Join"),
        (["pat", "path", "or more pathnam"], "Join two ", "or more pathnam"),
        (["path", "pat"], "Join two or more ", "pat"),
    ],
)
def test_the_stop_sequence_that_ended_a_message_is_named(
    served: Served, stops: list[str], text: str, stop: str
) -> None:
    """The one that begins first, in whatever order they are listed, with and without drafts."""
    body = {"messages": MESSAGES, "max_tokens": 30, **GREEDY}
    for several, spec in itertools.product((stops, stops[::-1]), ("auto", "off")):
        speculative = {"speculative": {"spec": spec}}
        answer = served.ask("/v1/messages", {**body, "stop_sequences": several, **speculative})
        assert "".join(block["text"] for block in answer["content"]) == text
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


def test_a_json_object_follows_its_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"zz": {"const": 42}},
        "required": ["zz"],
        "additionalProperties": False,
    }
    form = {"type": "json_object", "schema": schema}
    text = served.say(response_format=form, max_tokens=30)
    assert json.loads(text) == {"zz": 42}


@pytest.mark.parametrize("path", [CHAT, RAW])
def test_every_chunk_has_usage_on_request(served: Served, path: str) -> None:
    fields: dict[str, Any] = {"prompt": "import os"} if path == RAW else {}
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = served.stream(path, **fields, **GREEDY, n=2, stream_options=options)
    *chunks, last = events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] > 2
    for chunk in events:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, RAW])
def test_the_chunk_that_ends_a_choice_holds_no_text(served: Served, path: str) -> None:
    fields: dict[str, Any] = {"prompt": "import os"} if path == RAW else {}
    for extra_fields in ({}, {"stop": "o"}, {"logprobs": path == CHAT or 1}):
        events = served.stream(path, **fields, **GREEDY, **extra_fields)
        choices = [event["choices"][0] for event in events]
        (end,) = (choice for choice in choices if choice["finish_reason"])
        assert end is choices[-1] and not end.get("text") and not end.get("delta")
        assert end["logprobs"] is None


def test_more_prompts_than_slots_and_more_replies_queue(served: Served) -> None:
    """Each gets what it gets alone; the queue is not longer than the slots for it."""
    prompts = [f"def f{number}(" for number in range(3 * SLOTS)]
    fields = {"max_tokens": 4, **GREEDY}
    answer = served.ask(RAW, {"prompt": prompts, **fields})
    assert [choice["index"] for choice in answer["choices"]] == list(range(3 * SLOTS))
    alone = [served.ask(RAW, {"prompt": prompt, **fields})["choices"][0] for prompt in prompts[::5]]
    assert [choice["text"] for choice in answer["choices"][::5]] == [
        prompt["text"] for prompt in alone
    ]
    assert len(served.chat(n=2 * SLOTS + 1, max_tokens=1)["choices"]) == 2 * SLOTS + 1
    status, refused = served.send("POST", RAW, {"prompt": ["x"] * 128, "n": 9, **fields})
    assert status == 400 and refused["error"]["param"] == "n"
    assert served.service.open_requests == 0


def test_an_echoed_prompt_is_scored(served: Served) -> None:
    """Whole and streamed; the text of the reply is what it is without them."""
    text = 'def read(p):\n    """Ünïcode."""\n<|im_end|>'
    fields = {"prompt": text, "logprobs": 2, "max_tokens": 6, **GREEDY}
    plain = served.ask(RAW, fields)["choices"][0]
    choice = served.ask(RAW, {**fields, "echo": True})["choices"][0]
    assert choice["text"] == text + plain["text"]
    scores = choice["logprobs"]
    ids = served.ask("/tokenize", {"prompt": text})["tokens"]
    assert len(scores["tokens"]) == len(ids) + 6
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    assert scores["token_logprobs"][len(ids) :] == plain["logprobs"]["token_logprobs"]
    for entries in scores["top_logprobs"][1:]:
        assert 1 <= len(entries) <= 2
    starts = [*scores["text_offset"], len(choice["text"])]
    pieces = [choice["text"][a:b] for a, b in itertools.pairwise(starts)]
    assert "".join(pieces) == choice["text"]
    pairs = [pair for pair in zip(scores["tokens"], pieces, strict=True) if "\ufffd" not in pair[0]]
    assert len(pairs) > len(ids) - 5 and all(token == piece for token, piece in pairs)
    events = served.stream(RAW, **{**fields, "echo": True})
    chunks = [event["choices"][0] for event in events]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name, values in scores.items():
        streamed = [
            value for chunk in chunks if chunk["logprobs"] for value in chunk["logprobs"][name]
        ]
        assert streamed == values, name


def test_a_prompt_is_scored_without_a_reply(served: Served) -> None:
    """As evaluators ask: token ids, no new tokens; several prompts at once."""
    texts = ["def read(", "import os\nimport sys\n" * 30]
    prompts = [served.ask("/tokenize", {"prompt": text})["tokens"] for text in texts]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = served.ask(RAW, body)
    assert answer["usage"]["completion_tokens"] == 0
    for choice, ids, text in zip(answer["choices"], prompts, texts, strict=True):
        assert choice["text"] == text and choice["finish_reason"] == "length"
        scores = choice["logprobs"]["token_logprobs"]
        assert len(scores) == len(ids) and max(scores[1:]) <= 0
    longest = torch.tensor(answer["choices"][1]["logprobs"]["token_logprobs"][1:])
    assert longest[-20:].mean() > longest[:20].mean()  # what repeats is foreseen
    assert served.ask(RAW, {**body, "echo": False})["choices"][0]["text"] == ""
    assert served.ask(RAW, {"prompt": "ab", "echo": True, "max_tokens": 0})["choices"][0] == {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "text": "ab",
    }


def test_every_field_of_a_chat_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is checked and then forgotten would be accepted in silence."""
    seen: set[str] = set()

    class Body(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            seen.add(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            seen.add(str(name))
            return super().__contains__(name)

        def get(self, name: str, default: Any = None) -> Any:
            seen.add(name)
            return super().get(name, default)

    monkeypatch.setattr(chat_completions, "with_one_token_limit", lambda body, name: Body(body))
    body: dict[str, Any] = {"messages": MESSAGES}
    chat_completions.read_chat(body, served.service.settings)
    assert chat_completions.CHAT_FIELDS.keys() - seen - PASSED_OVER == {"max_completion_tokens"}

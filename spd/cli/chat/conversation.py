"""A chat: its turns, its prompt tokens, and its file.

The tokens of a reply stay those that were generated, as a span of their own, so that the next turn
hits the prefix cache and prefills only new tokens. Tokens and spans depend on the conversation
alone: live, after an undo, or loaded from a file, the same turns give the same prompt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any

from spd.cli.terminal.sink import free_space_hint, to_json
from spd.conversation.fields import (
    TEXT,
    FieldError,
    array_of,
    integer,
    open_object,
)
from spd.conversation.messages import check_messages, check_text
from spd.conversation.thinking import past_reply_message
from spd.conversation.vocabulary import Vocabulary
from spd.errors import IncompatibleError, NotFoundError, ResourceError, UsageError
from spd.formats.chat_template import RenderedChat, encode_rendered, render_chat
from spd.formats.files import open_output, write_atomically
from spd.formats.thinking import opens_thinking
from spd.runtime.engine.request import SEED_BITS

Spans = tuple[tuple[str, int], ...]
"""The kind, "prompt" or "generated", and the number of tokens of each span of a prompt."""


PROMPT = "› "
"""The prompt before a typed message."""


def is_command(text: str) -> bool:
    """True if a typed text is a slash command and not a message."""
    return text.startswith("/") and not text.startswith("//")


@dataclass(frozen=True)
class Turn:
    """A message and its reply, which is None until it comes.

    `reply_ids` are the tokens of the reply, empty if another vocabulary made it. `finish` is the
    engine's finish reason, "abort" if the reply was stopped; `seed` reproduces the reply alone.
    `answered` holds, as JSON, the message of a reply with tool calls and the messages of their
    results. A turn with an empty `user` continues after such messages.
    """

    user: str
    reply: str | None = None
    reply_ids: tuple[int, ...] = ()
    finish: str | None = None
    seed: int | None = None
    answered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """The saved state of a chat. `draws` counts replies, including undone ones.

    Each reply's seed is derived from the chat's `seed` and `draws`; see `Turn.seed`. `vocabulary`
    is the fingerprint of the tokenizer that the turns' ids belong to.
    """

    model: str
    seed: int = field(default_factory=partial(secrets.randbits, SEED_BITS))
    system: str | None = None
    vocabulary: str | None = None
    draws: int = 0
    turns: tuple[Turn, ...] = ()

    def with_last(self, turn: Turn) -> Conversation:
        """Return the conversation with another last turn."""
        return dataclasses.replace(self, turns=(*self.turns[:-1], turn))

    def without_last(self) -> Conversation:
        """Return the conversation without its last turn."""
        return dataclasses.replace(self, turns=self.turns[:-1])

    def for_model(self, name: str, vocabulary: str) -> Conversation:
        """Return the conversation for another model, without token ids of another vocabulary.

        vocabulary: the fingerprint of the model's tokenizer.
        """
        turns = self.turns
        if vocabulary != self.vocabulary:
            turns = tuple(dataclasses.replace(turn, reply_ids=()) for turn in turns)
        return dataclasses.replace(self, model=name, vocabulary=vocabulary, turns=turns)

    def with_overrides(self, system: str | None, seed: int | None) -> Conversation:
        """Return the conversation with another system message or seed; None keeps the present one.

        Another seed begins with `draws` at 0. Raises UsageError for a text that is not valid.
        """
        system = self.system if system is None else check_text(system, "the system message")
        conversation = dataclasses.replace(self, system=system)
        return (
            conversation if seed is None else dataclasses.replace(conversation, seed=seed, draws=0)
        )


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt: its text, token ids, and spans, which tell generated from prompt tokens."""

    text: str
    ids: tuple[int, ...]
    spans: Spans


class ChatEncoder:
    """Encodes conversations as prompts; caches those of earlier turns.

    variables: what the chat template gets besides the messages.
    """

    def __init__(self, vocabulary: Vocabulary, variables: Mapping[str, Any]) -> None:
        self._tokenizer = vocabulary.need_tokenizer()
        self._template = vocabulary.need_template()
        self._vocabulary = vocabulary
        self._context = vocabulary.config.max_positions
        self._variables = variables
        self._encoded_prompts: dict[object, EncodedPrompt] = {}
        self._length_cache: tuple[Conversation | None, int] = None, 0

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        """Return the prompt for the reply to the last turn.

        Raises what rendering and encoding raise.
        """
        prompts: dict[object, EncodedPrompt] = {}
        prompt: EncodedPrompt | None = None
        replies: list[dict[str, Any]] = []
        """The message of each turn's reply; unused for a turn with tool calls."""
        for count, turn in enumerate(conversation.turns):
            earlier_turns = conversation.turns[:count]
            key = (conversation.system, earlier_turns, turn.user)
            if key not in self._encoded_prompts:
                rendered = self._render_turns(
                    conversation.system, earlier_turns, replies, turn.user
                )
                self._encoded_prompts[key] = self._continue_prompt(prompt, earlier_turns, rendered)
            prompt = prompts[key] = self._encoded_prompts[key]
            inside_thinking = opens_thinking(prompt.text, self._vocabulary.marks)
            replies.append(past_reply_message(turn.reply or "", inside_thinking, self._vocabulary))
        self._encoded_prompts = prompts
        assert prompt is not None
        return prompt

    def count_tokens(self, conversation: Conversation) -> int:
        """Return the number of tokens of the last prompt and its reply, 0 without a turn.

        The last result is cached. Raises what `encode` raises.
        """
        if self._length_cache[0] is not conversation:
            count = 0
            if conversation.turns:
                last_turn = conversation.turns[-1]
                reply = last_turn.reply_ids or self._tokenizer.encode(last_turn.reply or "")
                count = len(self.encode(conversation).ids) + len(reply)
            self._length_cache = conversation, count
        return self._length_cache[1]

    def _render_turns(
        self,
        system: str | None,
        earlier_turns: Sequence[Turn],
        replies: Sequence[Mapping[str, Any]],
        user: str,
    ) -> RenderedChat:
        """Return the turns up to a message of the user as the template renders them.

        replies: the message of each earlier turn's reply. Raises IncompatibleError if the text
        cannot fit the model's context, and what the template raises.
        """
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        for index, turn in enumerate((*earlier_turns, Turn(user))):
            if turn.user or not messages or messages[-1]["role"] != "tool":
                messages.append({"role": "user", "content": turn.user})
            if turn.answered:
                messages += map(json.loads, turn.answered)
            elif turn.reply is not None:
                messages.append(replies[index])
        rendered = render_chat(self._tokenizer, self._template, messages, **self._variables)
        self._tokenizer.limit_length(rendered.marked, self._context)
        return rendered

    def _continue_prompt(
        self, previous: EncodedPrompt | None, earlier_turns: Sequence[Turn], rendered: RenderedChat
    ) -> EncodedPrompt:
        """Return the prompt of a rendered chat.

        It continues the previous prompt and reply if the template left those unchanged.
        """
        generated = () if previous is None else self._generated_ids(earlier_turns[-1])
        if previous is not None and generated:
            new_text = rendered.suffix_after(previous.text + (earlier_turns[-1].reply or ""))
            new_ids = encode_rendered(self._tokenizer, new_text) if new_text else []
            # Before another token the text of both could be encoded to other tokens.
            if new_ids and new_ids[0] in self._tokenizer.special_ids:
                if earlier_turns[-1].reply_ids[-1] == new_ids[0]:
                    generated = earlier_turns[-1].reply_ids
                    new_ids = new_ids[1:]
                spans = (*previous.spans, ("generated", len(generated)), ("prompt", len(new_ids)))
                return EncodedPrompt(rendered.text, (*previous.ids, *generated, *new_ids), spans)
        ids = encode_rendered(self._tokenizer, rendered)
        return EncodedPrompt(rendered.text, tuple(ids), prompt_spans(previous, ids))

    def _generated_ids(self, turn: Turn) -> tuple[int, ...]:
        """Return a reply's ids without its end token; empty if they do not decode to its text."""
        ids = turn.reply_ids
        if ids and ids[-1] in self._tokenizer.special_ids:
            ids = ids[:-1]
        return (
            ids
            if self._tokenizer.decode_bytes(ids).decode("utf-8", "replace") == turn.reply
            else ()
        )


def prompt_spans(previous: EncodedPrompt | None, ids: Sequence[int]) -> Spans:
    """Return the spans of the prompt `ids`.

    The prefix that it shares with `previous` keeps its spans; what follows is one of kind "prompt".
    """
    earlier = EncodedPrompt("", (), ()) if previous is None else previous
    pairs = zip(earlier.ids, ids, strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    num_left = num_shared
    spans: list[tuple[str, int]] = []
    for origin, length in earlier.spans:
        spans.append((origin, min(length, num_left)))
        num_left -= spans[-1][1]
    return tuple(span for span in (*spans, ("prompt", len(ids) - num_shared)) if span[1])


CHAT_SCHEMA = "spd.chat/1"
"""The schema in the first line of a chat's file."""
CHAT_SUFFIX = ".jsonl"
_CHAT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_saved_integer = integer(-(2**64), 2**64)
_parse_header = open_object(
    {
        "schema": TEXT,
        "model": TEXT,
        "seed": _saved_integer,
        "system": TEXT,
        "vocabulary": TEXT,
        "draws": _saved_integer,
    },
    *("model", "seed"),
)
_parse_turn = open_object(
    {"user": TEXT, "reply": TEXT, "finish": TEXT, "seed": _saved_integer}
    | {"reply_ids": array_of(integer(0, 2**31 - 1), 1 << 31), "answered": array_of(TEXT, 1 << 20)},
    "user",
)
"""The parsers of a file's lines ignore unknown fields, as a later version may add some."""


class SessionStore:
    """The saved chats in one folder, which is made when the first is locked or saved.

    One chat at a time is locked against other processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locked_chat: tuple[str, int] | None = None
        """The name of the locked chat and the descriptor of its lock file."""

    def names(self) -> list[str]:
        """Return the names of the saved chats, the latest first. Raises ResourceError."""
        chats: list[tuple[float, str]] = []
        try:
            entries = list(os.scandir(self.folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            message = f"the saved chats in {self.folder} cannot be listed: {error.strerror}"
            fix = "XDG_STATE_HOME=FOLDER spd chat keeps chats elsewhere"
            raise ResourceError(message, fix=[fix], code="sessions") from None
        for entry in entries:
            name = entry.name.removesuffix(CHAT_SUFFIX)
            if name != entry.name and _CHAT_NAME.fullmatch(name):
                with suppress(FileNotFoundError):  # removed meanwhile
                    chats.append((entry.stat(follow_symlinks=False).st_mtime, name))
        return [name for _, name in sorted(chats, key=itemgetter(0), reverse=True)]

    def path(self, name: str) -> Path:
        """Return the path of a saved chat. Raises UsageError for an invalid name."""
        if not _CHAT_NAME.fullmatch(name):
            reason = ["Letters, digits, dot, dash and underscore; no dot or dash in front."]
            raise UsageError(
                f"{name[:60]!r} is not a name for a chat", reason=reason, fix=["-c NAME"]
            )
        return self.folder / (name + CHAT_SUFFIX)

    def load(self, name: str) -> Conversation:
        """Read and check a saved chat, and return it.

        Raises NotFoundError, IncompatibleError naming file and line, and UsageError for its name.
        """
        path = self.path(name)
        line_number = 1
        turns: list[Turn] = []
        try:
            if path.exists() and not path.is_file():  # reading a FIFO would block
                raise OSError("it is not a file")
            header_line, *turn_lines = path.read_text(encoding="utf-8").split("\n")
            header = _parse_header(json.loads(header_line), "")
            schema = header.pop("schema", None)
            if schema != CHAT_SCHEMA:
                raise ValueError(
                    f"schema {schema!r} is not {CHAT_SCHEMA!r}: of another version of spd?"
                )
            for line in turn_lines:
                line_number += 1
                if line:
                    turn = Turn(**_parse_turn(json.loads(line), ""))
                    turns.append(turn)
                    if turn.answered:
                        check_messages(list(map(json.loads, turn.answered)), "answered")
            return Conversation(**header, turns=tuple(turns))
        except FileNotFoundError:
            names = ", ".join(self.names()[:5])
            reason = [f"The latest: {names}"] if names else []
            fix = ["-c alone continues the latest; /load in a chat lists them"]
            raise NotFoundError(f"no chat {name!r} is saved", reason=reason, fix=fix) from None
        except (OSError, ValueError, RecursionError, UsageError, FieldError) as error:
            fix = ["edit the file or move it away; -c NAME begins another chat"]
            message = f"{path}: line {line_number}: {error}"
            raise IncompatibleError(message, fix=fix, code="session_unreadable") from None

    def save(self, name: str, conversation: Conversation) -> None:
        """Write a chat atomically: the old or the new file is always complete.

        Makes the folder. Raises ResourceError, and UsageError for an invalid name.
        """
        path = self.path(name)
        header = dataclasses.asdict(conversation)
        turns = header.pop("turns")
        try:
            self._make_folder()
            lines = [{"schema": CHAT_SCHEMA, **header}, *turns]
            write_atomically(path, "".join(to_json(line) + "\n" for line in lines), 0o600)
        except OSError as error:
            message = f"this chat cannot be saved to {path}: {error.strerror}"
            fix = f"{free_space_hint(error)}XDG_STATE_HOME=FOLDER spd chat keeps chats elsewhere"
            raise ResourceError(message, fix=[fix], code="write_failed") from error

    def lock(self, name: str) -> None:
        """Lock a chat by a file of its own, and unlock the previous one.

        Makes the folder. Where no file can be written, nothing is locked and nothing is raised.
        Raises UsageError if another process has the lock, or for an invalid name.
        """
        path = self.path(name)
        if self._locked_chat is not None and self._locked_chat[0] == name:
            return
        lock = None
        try:
            self._make_folder()
            lock = (name, open_output(path.with_name(f".{name}.lock"), append=True))
        except OSError:
            pass  # saving will say so
        except UsageError:
            message = f"the chat {name!r} is open in another process"
            fix = ["-c NAME for another one, or close the other spd chat"]
            raise UsageError(message, fix=fix, code="session_locked") from None
        self.close()
        self._locked_chat = lock

    def lock_new(self) -> str:
        """Lock a new chat and return its name: date and time, and a number if that is taken."""
        base = f"{datetime.now():%Y-%m-%d-%H%M%S}"
        name = base
        suffix = 2
        while True:
            with suppress(UsageError):
                self.lock(name)
                if not self.path(name).exists():
                    return name
            name = f"{base}-{suffix}"
            suffix = suffix + 1

    def close(self) -> None:
        """Unlock the locked chat, if any."""
        if self._locked_chat is not None:
            os.close(self._locked_chat[1])
            self._locked_chat = None

    def _make_folder(self) -> None:
        """Make the folder and those above it, readable by their owner alone."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

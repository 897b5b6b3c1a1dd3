"""Slash commands, which go to the chat and not to the model; /help shows the docstrings of `Commands`."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from spd.cli.chat.conversation import Turn
from spd.cli.options import model_names, parse_think, read_settings, spec_names
from spd.cli.parser import in_order, parse_as
from spd.cli.prompt_input import read_text
from spd.cli.terminal.plain_text import shortened
from spd.errors import NotFoundError, SpdError, UsageError

if TYPE_CHECKING:
    from spd.cli.chat.loop import Chat

ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit", "/new": "/clear"}


class Commands:
    """Runs one command on a chat; answers go to the chat's `tell`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @classmethod
    def names(cls) -> list[str]:
        """Every command as it is typed."""
        return sorted("/" + name[3:] for name in vars(cls) if name.startswith("do_"))

    def run(self, line: str) -> None:
        """Run a typed command. Raises UsageError for an unknown command, and what the command raises."""
        word, _, rest = line.strip().partition(" ")
        name = ALIASES.get(word.lower(), word.lower())
        known = self.names()
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
            fix = [close[0] if close else "/help", f"/{line} to say it"]
            raise UsageError(f"unknown command {word}: {hint}", fix=fix)
        getattr(self, "do_" + name[1:])(rest.strip())

    def completions(self) -> dict[str, Callable[[], Iterable[str]] | None]:
        """Every command, and what TAB offers behind it; None for paths."""
        words: dict[str, Callable[[], Iterable[str]] | None] = dict.fromkeys(self.names(), tuple)
        words |= {
            "/file": None,
            "/load": self._saved_names,
            "/think": lambda: ["on", "off", "hide"],
        }
        return words | {"/model": lambda: model_names(""), "/spec": lambda: spec_names("")}

    def _saved_names(self) -> list[str]:
        """Return the names that TAB offers; a key raises no error."""
        with suppress(SpdError):
            return self._chat.store.names()
        return []

    def do_help(self, rest: str) -> None:
        """this list"""
        for name in self.names():
            self._chat.tell(f"  {name:<10} {getattr(self, 'do_' + name[1:]).__doc__}")
        self._chat.tell(
            "  Enter sends, Alt-Enter or Ctrl-J begins a line, Ctrl-G opens $EDITOR, // sends a slash.",
            "  Esc or Ctrl-C stops a reply and keeps what came, or stops loading; Ctrl-D quits.",
        )

    def do_exit(self, rest: str) -> None:
        """quit (also /bye, /quit, Ctrl-D)"""
        self._chat.leaving = True

    def do_clear(self, rest: str) -> None:
        """begin a new chat; this one stays saved"""
        self._chat.start_new()
        self._chat.tell("a new chat")

    def do_undo(self, rest: str) -> None:
        """take back the last message and its reply"""
        turn = self._last()
        self._chat.change(self._chat.conversation.without_last())
        self._chat.tell(f"took back: {shortened(turn.user, 60)}")

    def do_regen(self, rest: str) -> None:
        """reply to the last message once more, with another seed"""
        self._chat.reply(self._chat.conversation.with_last(**vars(Turn(self._last().user))))

    def do_more(self, rest: str) -> None:
        """continue a reply that was cut short"""
        turn = self._last()
        if turn.finish not in ("length", "abort") or not turn.reply_ids:
            raise UsageError("the last reply was not cut short", fix=["/regen for another one"])
        self._chat.reply(self._chat.conversation)

    def do_edit(self, rest: str) -> None:
        """rewrite the last message"""
        self._chat.draft = self._last().user
        self._chat.change(self._chat.conversation.without_last())

    def do_system(self, rest: str) -> None:
        """show the system message, or set it: /system TEXT"""
        self._chat.change(self._chat.conversation.with_wishes(rest or None, None))
        self._chat.tell(*f"system  {self._chat.conversation.system or '(none)'}".splitlines())

    def do_set(self, rest: str) -> None:
        """change sampling: /set temperature=0.5 top_p=0.9; top_p=auto takes it back; alone it lists"""
        changes = read_settings(_words(rest), "/set")
        self._chat.model.change(**changes)
        self._chat.change(self._chat.conversation.with_wishes(None, changes.get("seed")))
        self._chat.tell(*self._chat.model.sampling_lines())

    def do_spec(self, rest: str) -> None:
        """show what drafts, or reload with another method: /spec METHOD [K]"""
        if not rest:
            self._chat.tell(*self._chat.model.lines())
            return
        name, _, most = rest.partition(" ")
        method = in_order(name)
        known = spec_names("")
        if method not in known or not (most or "0").isdigit():
            raise UsageError(f"/spec {rest}: is not a method", fix=[f"/spec {'|'.join(known)} [K]"])
        self._chat.reload(spec=method, draft_max=int(most) if most else None)

    def do_model(self, rest: str) -> None:
        """show the model, or load another and go on with this chat: /model NAME"""
        if rest:
            self._chat.reload(model=rest)
        else:
            self._chat.tell(*self._chat.model.lines())

    def do_stats(self, rest: str) -> None:
        """a line of figures after each reply: /stats on|off; alone: all of the last"""
        if rest:
            self._chat.stats = parse_as("/stats", "bool", rest)
        else:
            self._chat.tell(*self._chat.model.last_stats())

    def do_think(self, rest: str) -> None:
        """let the model think: /think on|off|hide, or at most so many tokens: /think N"""
        self._chat.model.change(think=parse_think(rest, "/think"))

    def do_file(self, rest: str) -> None:
        """put files in front of the next message: /file PATH…; none drops them; alone it lists them"""
        if rest == "none":
            self._chat.attached = []
        else:
            self._chat.attached += [(path, _read_file(path)) for path in _words(rest)]
        sizes = ", ".join(f"{path}: {len(text):,} characters" for path, text in self._chat.attached)
        self._chat.tell(
            f"goes with the next message: {sizes}"
            if sizes
            else "no file goes with the next message"
        )

    def do_load(self, rest: str) -> None:
        """continue a saved chat: /load NAME; alone it lists them, the latest first"""
        if rest:
            self._chat.load(rest)
            return
        for name in (names := self._chat.store.names()):
            try:
                words = [shortened(turn.user, 60) for turn in self._chat.store.load(name).turns[:1]]
            except SpdError as error:
                words = [error.message]
            self._chat.tell(f"  {name}  {''.join(words)}")
        if not names:
            self._chat.tell("no chat is saved")

    def _last(self) -> Turn:
        turns = self._chat.conversation.turns
        if not turns:
            raise UsageError("nothing has been said yet", fix=["type a message"])
        return turns[-1]


def _read_file(path: str) -> str:
    """Return the text of a file. Raises NotFoundError, and UsageError for what is no text."""
    place = "./-" if path == "-" else os.path.expanduser(path)  # stdin is the chat's own
    try:
        return read_text(place)
    except NotFoundError:
        raise NotFoundError(f"no file {path}", fix=["check the path; TAB completes it"]) from None


def _words(line: str) -> list[str]:
    """The words behind a command; quotes keep blanks together."""
    try:
        return shlex.split(line)
    except ValueError:
        return re.split(r"\s+", line.strip())

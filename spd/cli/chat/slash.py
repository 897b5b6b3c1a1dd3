"""Slash commands, which go to the chat and not to the model.

Each is a method of `Commands`, found by its name; its first line is what /help shows.
"""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from typer import BadParameter

from spd.cli.chat.conversation import Turn
from spd.cli.chat.message_source import words_of
from spd.cli.options import parse_spec, parse_switch, parse_think, read_settings, spec_names
from spd.cli.text.output import printable
from spd.cli.text.prompt import read_text
from spd.errors import UsageError
from spd.runtime.plan.config import METHODS

if TYPE_CHECKING:
    from spd.cli.chat.loop import Chat

ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit", "/new": "/clear"}
WITH_PATH = ("/file",)


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
            raise UsageError(
                f"unknown command {word}: {hint}", fix=[close[0] if close else "/help", f"/{line} to say it"]
            )
        getattr(self, "do_" + name[1:])(rest.strip())

    def do_help(self, rest: str) -> None:
        """this list"""
        self._chat.tell(*(f"  {name:<10} {getattr(self, 'do_' + name[1:]).__doc__}" for name in self.names()))
        self._chat.tell(
            "  Enter sends, Alt-Enter or Ctrl-J begins a line, Ctrl-G opens $EDITOR, // sends a slash.",
            "  Esc or Ctrl-C stops a reply and keeps what came; Ctrl-D quits.",
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
        self._chat.tell(f"took back: {_short(turn.user)}")

    def do_regen(self, rest: str) -> None:
        """reply to the last message once more, with another seed"""
        self._last()
        last = self._chat.conversation.with_last(reply=None, reply_ids=(), finish=None, seed=None)
        self._chat.reply_to(last)

    def do_more(self, rest: str) -> None:
        """continue a reply that was cut short"""
        turn = self._last()
        if turn.reply is None or turn.finish not in ("length", "abort") or not turn.reply_ids:
            raise UsageError("the last reply was not cut short", fix=["/regen for another one"])
        self._chat.reply(more=True)

    def do_edit(self, rest: str) -> None:
        """rewrite the last message; /edit reply rewrites the reply"""
        turn = self._last()
        if rest == "reply":
            changed = self._chat.source.read(turn.reply or "")
            if changed is not None and changed != turn.reply:
                last = self._chat.conversation.with_last(reply=changed, reply_ids=(), finish="edited")
                self._chat.change(last)
            return
        if rest:
            raise UsageError(f"/edit {rest}: what?", fix=["/edit", "/edit reply"])
        self._chat.change(self._chat.conversation.without_last())
        self._chat.draft = turn.user

    def do_system(self, rest: str) -> None:
        """show the system message, or set it: /system TEXT"""
        if rest:
            self._chat.change(dataclasses.replace(self._chat.conversation, system=rest))
        self._chat.tell(*f"system  {self._chat.conversation.system or '(none)'}".splitlines())

    def do_set(self, rest: str) -> None:
        """change sampling parameters: /set temperature=0.5 top_p=0.9; alone it shows"""
        words = words_of(rest)
        self._chat.set_sampling(read_settings(words, "/set"))
        self._chat.tell(*self._chat.model.shown("params"))

    def do_spec(self, rest: str) -> None:
        words = rest.split()
        if not words:
            self._chat.tell(*self._chat.model.shown("spec"))
            return
        try:
            method = parse_spec(words[0])
        except BadParameter:
            method = ""
        if not method or len(words) > 2 or not all(w.isdigit() for w in words[1:]):
            known = "|".join(spec_names(""))
            raise UsageError(f"/spec {rest}: is not a method", fix=[f"/spec {known} [K]"])
        self._chat.reload(spec=method, draft_max=int(words[1]) if words[1:] else None)

    do_spec.__doc__ = f"reload with another drafter: /spec {'|'.join(METHODS)}|mtp,ngram [K]"

    def do_model(self, rest: str) -> None:
        """load another model and go on with this chat: /model NAME"""
        if not rest:
            self._chat.tell(*self._chat.model.shown("model"))
            return
        self._chat.reload(model=rest)

    def do_draft(self, rest: str) -> None:
        """colour accepted draft tokens: /draft on|off"""
        on = parse_switch("/draft", rest)
        self._chat.look = dataclasses.replace(self._chat.look, drafts=on)
        self._chat.tell("accepted draft tokens are marked; Markdown is off meanwhile" if on else "not marked")

    def do_stats(self, rest: str) -> None:
        """a line of figures after each reply: /stats on|off; alone or with full: all of the last"""
        if rest in ("", "full"):
            self._chat.tell(*self._chat.model.full_stats())
            return
        self._chat.stats = parse_switch("/stats", rest)

    def do_think(self, rest: str) -> None:
        """let the model think: /think on|off|hide, or at most so many tokens: /think N"""
        self._chat.set_thinking(parse_think(rest, "/think"))

    def do_file(self, rest: str) -> None:
        """put files in front of the next message: /file PATH…; none drops them; alone it lists them"""
        if rest == "none":
            self._chat.attached = []
        else:
            paths = words_of(rest)
            self._chat.attached += [(path, read_text(str(Path(path).expanduser()))) for path in paths]
        sizes = ", ".join(f"{path}: {len(text):,} characters" for path, text in self._chat.attached)
        self._chat.tell(f"goes with the next message: {sizes or 'no file'}")

    def do_load(self, rest: str) -> None:
        """continue a saved chat: /load NAME; alone it lists them, the latest first"""
        if rest:
            self._chat.load(rest)
            return
        store = self._chat.store
        lines = [f"  {name}  {_short(store.first_words(name))}".rstrip() for name in store.names()]
        self._chat.tell(*(lines or ["no chat is saved"]))

    def _last(self) -> Turn:
        turns = self._chat.conversation.turns
        if not turns:
            raise UsageError("nothing has been said yet", fix=["type a message"])
        return turns[-1]


def _short(text: str) -> str:
    """The beginning of a text on one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= 60 else line[:59] + "…"

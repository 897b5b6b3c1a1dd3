"""Slash commands of a chat; /help prints the docstrings of `Commands`."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from spd.cli.chat.conversation import Turn
from spd.cli.options import model_completions, parse_sampling_settings, parse_think, spec_names
from spd.cli.parser import normalize_spec, parse_value
from spd.cli.prompt_input import read_text
from spd.cli.terminal.plain_text import shorten
from spd.errors import NotFoundError, SpdError, UsageError

if TYPE_CHECKING:
    from spd.cli.chat.loop import Chat

COMMAND_ALIASES = {"/?": "/help", "/bye": "/exit", "/quit": "/exit", "/new": "/clear"}
"""Slash commands by other names, which chats of other programs have."""


class Commands:
    """Runs slash commands on a chat; their output goes to the chat's `print_lines`."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    @classmethod
    def names(cls) -> list[str]:
        """Return every command as it is typed."""
        return sorted("/" + name[3:] for name in vars(cls) if name.startswith("do_"))

    def run(self, line: str) -> None:
        """Run a typed command.

        Raises UsageError for an unknown one, and what the command raises.
        """
        command, _, argument = line.strip().partition(" ")
        name = COMMAND_ALIASES.get(command.lower(), command.lower())
        names = self.names()
        if name not in names:
            close_matches = difflib.get_close_matches(name, [*names, *COMMAND_ALIASES], n=1)
            hint = (
                f"did you mean {close_matches[0]}?" if close_matches else "/help lists the commands"
            )
            fix = [close_matches[0] if close_matches else "/help", f"/{line} to say it"]
            raise UsageError(f"unknown command {command}: {hint}", fix=fix)
        getattr(self, "do_" + name[1:])(argument.strip())

    def completions(self) -> dict[str, Callable[[], Iterable[str]] | None]:
        """Return every command and the source of its completions; None stands for paths."""
        completers: dict[str, Callable[[], Iterable[str]] | None] = dict.fromkeys(
            self.names(), tuple
        )
        completers |= {
            "/file": None,
            "/load": self._saved_names,
            "/think": lambda: ["on", "off", "hide"],
        }
        return completers | {
            "/model": lambda: model_completions(""),
            "/spec": lambda: spec_names(""),
        }

    def _saved_names(self) -> list[str]:
        """Return the names of saved chats.

        Empty if they cannot be listed, as a completion never raises.
        """
        with suppress(SpdError):
            return self._chat.store.names()
        return []

    def do_help(self, argument: str) -> None:
        """this list"""
        for name in self.names():
            self._chat.print_line(f"  {name:<10} {getattr(self, 'do_' + name[1:]).__doc__}")
        self._chat.print_line(
            "  Enter sends, Alt-Enter or Ctrl-J begins a line, Ctrl-G opens $EDITOR, // sends a slash."
        )
        self._chat.print_line(
            "  Esc or Ctrl-C stops a reply and keeps what came, or stops loading; Ctrl-D quits."
        )

    def do_exit(self, argument: str) -> None:
        """quit (also /bye, /quit, Ctrl-D)"""
        self._chat.should_exit = True

    def do_clear(self, argument: str) -> None:
        """begin a new chat; this one stays saved"""
        self._chat.start_new()
        self._chat.print_line("a new chat")

    def do_undo(self, argument: str) -> None:
        """take back the last message and its reply"""
        turn = self._last_turn()
        self._chat.set_conversation(self._chat.conversation.without_last())
        self._chat.print_line(f"took back: {shorten(turn.user, 60)}")

    def do_regen(self, argument: str) -> None:
        """reply to the last message once more, with another seed"""
        turn = Turn(self._last_turn().user)
        if not self._chat.model.settings.sampling.params.temperature:
            self._chat.print_line("temperature 0 gives one reply; /set temperature=0.8 varies it")
        self._chat.reply(self._chat.conversation.with_last(turn))

    def do_more(self, argument: str) -> None:
        """continue a reply that was cut short"""
        turn = self._last_turn()
        if turn.finish not in ("length", "abort") or not turn.reply_ids:
            raise UsageError("the last reply was not cut short", fix=["/regen for another one"])
        self._chat.reply(self._chat.conversation)

    def do_edit(self, argument: str) -> None:
        """rewrite the last message"""
        self._chat.unsent_text = self._last_turn().user
        self._chat.set_conversation(self._chat.conversation.without_last())

    def do_system(self, argument: str) -> None:
        """show the system message, or set it: /system TEXT"""
        self._chat.set_conversation(self._chat.conversation.with_overrides(argument or None, None))
        self._chat.print_lines(f"system  {self._chat.conversation.system or '(none)'}".splitlines())

    def do_set(self, argument: str) -> None:
        """change sampling: /set temperature=0.5 top_p=0.9; top_p=auto takes it back; alone it lists"""
        changes = parse_sampling_settings(_split_arguments(argument), "/set")
        options = dataclasses.replace(self._chat.model.options, **changes)
        self._chat.model.update_options(options)
        self._chat.set_conversation(
            self._chat.conversation.with_overrides(None, changes.get("seed"))
        )
        self._chat.print_lines(self._chat.model.sampling_lines())

    def do_spec(self, argument: str) -> None:
        """show what drafts, or reload with another method: /spec METHOD [K]"""
        if not argument:
            self._chat.print_lines(self._chat.model.summary_lines())
            return
        name, _, draft_max = argument.partition(" ")
        method = normalize_spec(name)
        methods = spec_names("")
        if method not in methods or not (draft_max or "0").isdigit():
            single_methods = "|".join(name for name in methods if "+" not in name)
            fix = [f"/spec {single_methods} [K]", "/spec mtp+ngram, or another beside lookup"]
            raise UsageError(f"/spec {argument}: is not a method", fix=fix)
        options = dataclasses.replace(
            self._chat.model.options,
            spec=method,
            draft_max=int(draft_max) if draft_max else None,
        )
        self._chat.reload_model(options)

    def do_model(self, argument: str) -> None:
        """show the model, or load another and go on with this chat: /model NAME"""
        if argument:
            options = dataclasses.replace(self._chat.model.options, model=argument)
            try:
                self._chat.reload_model(options)
            except SpdError as error:
                error.fix = tuple(re.sub("^-m ", "/model ", line) for line in error.fix)
                raise
        else:
            self._chat.print_lines(self._chat.model.summary_lines())

    def do_stats(self, argument: str) -> None:
        """a line of figures after each reply: /stats on|off; alone: all of the last"""
        if argument:
            self._chat.shows_stats = parse_value("/stats", "bool", argument)
        else:
            self._chat.print_lines(self._chat.model.last_stats_lines())

    def do_think(self, argument: str) -> None:
        """let the model think: /think on|off|hide, or at most so many tokens: /think N"""
        think = parse_think(argument, "/think")
        self._chat.model.update_options(dataclasses.replace(self._chat.model.options, think=think))

    def do_file(self, argument: str) -> None:
        """put files in front of the next message: /file PATH…; none drops them; alone it lists them"""
        if argument == "none":
            self._chat.attached_files = []
        else:
            self._chat.attached_files += [
                (path, _read_file(path)) for path in _split_arguments(argument)
            ]
        self._chat.print_attached()

    def do_load(self, argument: str) -> None:
        """continue a saved chat: /load NAME; alone it lists them, the latest first"""
        if argument:
            self._chat.load_saved(argument)
            return
        names = self._chat.store.names()
        for name in names:
            try:
                summary = [shorten(turn.user, 60) for turn in self._chat.store.load(name).turns[:1]]
            except SpdError as error:
                summary = [error.message]
            self._chat.print_line(f"  {name}  {''.join(summary)}")
        if not names:
            self._chat.print_line("no chat is saved")

    def _last_turn(self) -> Turn:
        """Return the last turn. Raises UsageError if there is none."""
        turns = self._chat.conversation.turns
        if not turns:
            raise UsageError("nothing has been said yet", fix=["type a message"])
        return turns[-1]


def _read_file(path: str) -> str:
    """Return the text of a file; `~` stands for the home folder, `-` for a file of that name.

    Raises NotFoundError, and UsageError for a file that is not text.
    """
    location = "./-" if path == "-" else os.path.expanduser(path)  # stdin is the chat's own
    try:
        return read_text(location)
    except NotFoundError:
        raise NotFoundError(f"no file {path}", fix=["check the path; TAB completes it"]) from None


def _split_arguments(line: str) -> list[str]:
    """Return the arguments of a slash command; quotes keep blanks together.

    Where a quote is not closed, quotes are letters.
    """
    try:
        return shlex.split(line)
    except ValueError:
        return re.split(r"\s+", line.strip())

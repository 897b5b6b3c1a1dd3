"""Line editing for chats on a terminal; the only module that imports prompt_toolkit.

Enter sends; Alt-Enter and Ctrl-J begin a line. A long paste stands as one word until it is sent.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.data_structures import Point
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.input.vt100_parser import Vt100Parser
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.screen import Char
from prompt_toolkit.output import ColorDepth

from spd.cli.chat.message_source import INDENT, PROMPT, Unsaid, as_message, is_complete
from spd.cli.signals import Interrupted
from spd.cli.text.output import write_stderr

CHIP_LINES = 20
"""Pasted lines above which a paste is shown as one word."""
TWICE_SECONDS = 2.0
LOST_SECONDS = 1.0
"""How long a paste that has not ended may stand still."""
PASTE_ENDS = "\x1b[201~"


class _PrivateHistory(FileHistory):
    """A history file for its owner alone; a long paste is kept whole, not as the word that stood for it."""

    def __init__(self, path: Path, expand: Callable[[str], str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        super().__init__(str(path))
        self._expand = expand

    def append_string(self, string: str) -> None:
        super().append_string(self._expand(string))

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # a full disk is no reason to lose the message
            super().store_string(string)


class _CommandCompleter(Completer):
    """Completes slash commands, and paths behind those that take one."""

    def __init__(self, commands: Sequence[str], with_path: Sequence[str]) -> None:
        self._commands, self._with_path = commands, with_path
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, blank, rest = text.partition(" ")
        if not blank:
            yield from (Completion(c, -len(text)) for c in self._commands if c.startswith(command))
        elif command in self._with_path:
            path = rest.rsplit(" ", 1)[-1]
            yield from self._paths.get_completions(Document(path), complete_event)


class Editor:
    """Line editing on a terminal. `status` is the text of the bottom line, asked for at every redraw."""

    def __init__(
        self,
        history: Path | None,
        *,
        color: bool,
        status: Callable[[], str],
        commands: Sequence[str],
        with_path: Sequence[str],
    ) -> None:
        self._pastes: dict[str, str] = {}
        self._hinted = -TWICE_SECONDS
        self._unsaid = Unsaid()
        self._reason: BaseException | None = None
        self._ahead = self._carried = False
        """Whether keys were typed before the prompt came, and whether some of them are left."""
        kept: History = InMemoryHistory()
        if history is not None:
            with suppress(OSError):
                kept = _PrivateHistory(history, self.expand)
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=INDENT,
            history=kept,
            enable_history_search=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            complete_while_typing=False,
            completer=_CommandCompleter(commands, with_path),
            key_bindings=self._bindings(),
            bottom_toolbar=status,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            reserve_space_for_menu=4,
        )
        app: Any = self._session.app
        app._on_resize = self._resize

    def _resize(self) -> None:
        """Redraw from the start of the prompt after the terminal has rewrapped its rows.

        Row by row, because tmux keeps a screen that is erased as a whole among the rows above.
        """
        app = self._session.app
        renderer: Any = app.renderer
        if (screen := renderer.last_rendered_screen) is not None:
            size, at = app.output.get_size(), renderer._cursor_pos
            above = sum(rows_of(screen.data_buffer[y], size.columns) for y in range(at.y))
            app.output.cursor_up(above + at.x // size.columns)
            app.output.write_raw("\r\x1b7" + "\x1b[2K\x1b[B" * size.rows + "\x1b8")
            renderer._cursor_pos = Point(0, 0)
        Application._on_resize(app)

    def read(self, draft: str = "") -> str | None:
        """The next message. Raises Interrupted when Ctrl-C is pressed twice on an empty line."""
        self._ahead, self._carried = self._carried or _has_input(), False
        try:
            text = self._session.prompt(default=draft, pre_run=self._begin)
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        text = as_message(self.expand(text).removesuffix("\\"))
        self._pastes.clear()
        return text

    def _begin(self) -> None:
        """What came while no prompt stood: news go above this one, a reason to leave ends it."""
        self._session.app.create_background_task(self._end_lost_pastes())
        write_stderr(self.unsaid(), styled=True)
        self._leave()

    async def _end_lost_pastes(self) -> None:
        """End a paste whose end mark got lost: else every key, Ctrl-C too, would count as a part of it."""
        app = self._session.app
        parser: Any = getattr(app.input, "vt100_parser", None)
        before = None
        while parser is not None:
            await asyncio.sleep(LOST_SECONDS)
            held = len(parser._paste_buffer) if parser._in_bracketed_paste else None
            if held is not None and held == before:
                parser.feed(PASTE_ENDS)
                app.key_processor.feed_multiple(app.input.read_keys())
                app.key_processor.process_keys()
            before = held

    def say(self, text: str) -> None:
        """Show news above the prompt that stands, or the next. From any thread."""
        self._unsaid.append(text)
        self._soon(self._show)

    def unsaid(self) -> str:
        """The news that wait for a prompt."""
        return self._unsaid.take()

    def _show(self) -> None:
        """Show the news above the prompt that stands."""
        app = self._session.app
        if not app.is_running or app.is_done or not (text := self.unsaid()):
            return
        # The terminal stays as it is: while it read lines by itself, Enter would begin a line.
        app.renderer.erase()
        write_stderr(text, styled=True)
        app.renderer.request_absolute_cursor_position()
        app.invalidate()

    def _soon(self, work: Callable[[], None]) -> None:
        """Have the prompt that stands do this; nothing where none does, or where it just ends."""
        app = self._session.app
        loop = app.loop
        if loop is not None and app.is_running:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(work, context=app.context)

    def wake(self) -> None:
        """Redraw the status line; from any thread."""
        self._session.app.invalidate()

    def keep(self, typed: bytes) -> None:
        """Take keys that were typed while a reply came: the next message begins with them."""
        presses: list[KeyPress] = []
        parser = Vt100Parser(presses.append)
        parser.feed_and_flush(typed.decode("utf-8", "replace"))
        store_typeahead(self._session.app.input, presses)
        self._carried = self._carried or bool(presses)

    def leave(self, error: BaseException) -> None:
        """Make `read` raise this, at once or when it begins; from any thread."""
        self._reason = error
        self._soon(self._leave)

    def _leave(self) -> None:
        app = self._session.app
        if self._reason is not None and app.is_running and not app.is_done:
            app.exit(exception=self._reason)

    def expand(self, text: str) -> str:
        """Text with every paste in its own words."""
        for chip, pasted in self._pastes.items():
            text = text.replace(chip, pasted)
        return text

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            self._enter(event)

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-g")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.text = self.expand(event.current_buffer.text)
            event.current_buffer.open_in_editor()

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._chip(event.data))

        @keys.add("c-c")
        @keys.add("<sigint>")
        def _(event: KeyPressEvent) -> None:
            self._interrupt(event)

        return keys

    def _enter(self, event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        keys = (press.key for press in event.key_processor.input_queue)
        more = any(len(key) == 1 or key == Keys.ControlM for key in keys)
        self._carried = more and self._ahead
        if more and not self._ahead:
            buffer.insert_text("\n")  # a paste that the terminal did not mark
        elif is_complete(self.expand(buffer.text)):
            buffer.validate_and_handle()
        elif buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        else:
            buffer.insert_text("\n")

    def _chip(self, pasted: str) -> str:
        """A paste as it is, or one word for it if it is long."""
        text = pasted.replace("\r\n", "\n").replace("\r", "\n")
        lines = text.count("\n") + (not text.endswith("\n"))
        if lines <= CHIP_LINES:
            return text
        chip = f"[pasted {lines:,} lines]"
        number = 1
        while self._pastes.get(chip, text) != text:
            number += 1
            chip = f"[pasted {lines:,} lines, {number}]"
        self._pastes[chip] = text
        return chip

    def _interrupt(self, event: KeyPressEvent) -> None:
        """Clear the line; on an empty one say how to leave, and leave at the second time."""
        if event.current_buffer.text:
            event.current_buffer.reset()
            return
        now = time.monotonic()
        if now - self._hinted < TWICE_SECONDS:
            event.app.exit(exception=KeyboardInterrupt)
            return
        self._hinted = now
        self.say("Ctrl-D or /exit to quit")


def rows_of(cells: Mapping[int, Char], columns: int) -> int:
    """Rows that a row of a wider terminal takes; a character of two columns is never cut."""
    rows = column = position = 0
    end = max((i for i, cell in cells.items() if cell.char != " "), default=-1)
    while position <= end:
        width = cells[position].width or 1
        if not column or column + width > columns:
            rows, column = rows + 1, 0
        column, position = column + width, position + width
    return rows or 1


def _has_input() -> bool:
    """Whether keys wait in the terminal."""
    with suppress(OSError, ValueError):
        return bool(select.select([sys.stdin], [], [], 0)[0])
    return False

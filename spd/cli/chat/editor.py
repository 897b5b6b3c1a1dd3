"""The line editor of a chat on a terminal; with `message_view` all that uses prompt_toolkit."""

from __future__ import annotations

import asyncio
import fcntl
import select
import signal
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import ColorDepth

from spd.cli.chat.conversation import PROMPT, is_command
from spd.cli.chat.message_view import MessageView
from spd.cli.signals import Interrupted

MAX_INLINE_PASTE_LINES = 20
"""A paste of more lines is shown as a placeholder."""
MAX_MENU_ROWS = 17
"""Rows of the message and of the completions below it, of which the library shows 16 at most."""
MIN_MENU_ROWS = 4
"""Those rows on a terminal that has few."""
QUIT_SECONDS = 2.0
"""A second Ctrl-C quits within this time of the first."""
ESCAPE_SECONDS = 0.05
"""An Esc is a key of its own if nothing follows for so long: key sequences arrive at once."""
TYPED_ENTER = Keys.F24
"""Replaces an Enter that was pressed while spd was busy: it submits its line in any case."""

CompletionSource = Callable[[], Iterable[str]]
"""Returns completions of a command's argument."""


class Editor:
    """A line editor on a terminal, with a toolbar that shows the text that `status` returns.

    The toolbar is redrawn until `loaded` returns True; an exception of `loaded` ends `read`.
    `commands` and their arguments are completed: by their source, or as paths if it is None.
    `warn` is called with a message if the history cannot be kept.
    """

    def __init__(
        self,
        history: Path,
        *,
        color: bool,
        status: Callable[[], str],
        warn: Callable[[str], None],
        loaded: Callable[[], bool],
        commands: Mapping[str, CompletionSource | None],
    ) -> None:
        self._status = status
        self._is_loaded = loaded
        self._pastes: dict[str, str] = {}
        self._refused_draft = ""
        """A refused message that waits until lines typed meanwhile are read."""
        self._queued_lines = 0
        """The number of unread lines that were typed while spd was busy."""
        self._last_interrupt = -QUIT_SECONDS
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation=" " * len(PROMPT),
            history=_ExpandedHistory(history, self.expand, warn),
            enable_history_search=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            complete_while_typing=False,
            completer=_CommandCompleter(commands),
            key_bindings=self._make_key_bindings(),
            bottom_toolbar=self._toolbar_text,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            input_processors=[MessageView(margin=len(PROMPT))],
        )

    def read(self, draft: str = "") -> str | None:
        """Edit and return the next message, None at the end of input.

        Raises Interrupted after a second Ctrl-C, and what `loaded` raises.

        Lines that were typed while spd was busy come first, one by one. A refused `draft` waits
        until they are read; lines that are no commands are appended to it, as it is older.
        """
        self._queue_cooked_lines()
        draft = "\n".join(filter(None, (self._refused_draft, draft)))
        self._refused_draft = ""
        while draft and self._queued_lines:
            text = self._edit_message("")
            if text is None or is_command(text):
                self._refused_draft = draft
                return text
            draft = "\n".join(filter(None, (draft, text)))
        return self._edit_message(draft)

    def _edit_message(self, draft: str) -> str | None:
        """Show the prompt with a draft and return the message made of it, pastes in full.

        None at the end of input. Raises Interrupted, and what `loaded` raises.
        """
        # A refused message shows its placeholders again.
        for placeholder, pasted_text in self._pastes.items():
            draft = draft.replace(pasted_text, placeholder)
        rows = self._session.output.get_size().rows
        self._session.reserve_space_for_menu = max(MIN_MENU_ROWS, min(MAX_MENU_ROWS, rows - 4))
        try:
            text = self._session.prompt(default=draft, pre_run=self._redraw_while_loading)
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        return self.expand(text)

    def expand(self, text: str) -> str:
        """Return text with placeholders replaced by their pastes."""
        for placeholder, pasted_text in self._pastes.items():
            text = text.replace(placeholder, pasted_text)
        return text

    def _queue_cooked_lines(self) -> None:
        """Read lines that were typed while the terminal was in cooked mode, and queue them."""
        source = self._session.input
        presses = list[KeyPress]()
        with suppress(OSError, ValueError, termios.error):
            while self._is_cooked() and _count_readable_bytes(source.fileno()):
                presses += source.read_keys()
        for number, press in enumerate(presses):
            if press.key == Keys.ControlJ:  # a cooked terminal sends Enter as a newline
                presses[number] = KeyPress(Keys.ControlM, press.data)
        self._queue_keys(presses)

    def _is_cooked(self) -> bool:
        """True if the terminal is in cooked (line) mode."""
        local_flags: int = termios.tcgetattr(self._session.input.fileno())[3]
        return bool(local_flags & termios.ICANON)

    def _queue_keys(self, presses: list[KeyPress]) -> None:
        """Queue keys for the next messages; each Enter among them ends one."""
        for number, press in enumerate(presses):
            if press.key == Keys.ControlM:
                presses[number] = KeyPress(TYPED_ENTER, "")
                self._queued_lines += 1
        store_typeahead(self._session.input, presses)

    @contextmanager
    def capture_typing(self, stop: Callable[[], None]) -> Iterator[None]:
        """Capture keys typed during the block without echo; queue them for the next messages.

        Esc calls `stop`, in the thread that reads the keys.
        """
        self._queue_cooked_lines()
        source = self._session.input
        output = self._session.output
        done = threading.Event()
        captured_presses = list[KeyPress]()

        def watch() -> None:
            """Read keys until the block ends."""
            with suppress(OSError, ValueError):  # a closed terminal sends nothing
                while not done.is_set() and not source.closed:
                    has_input = select.select([source.fileno()], [], [], ESCAPE_SECONDS)[0]
                    for press in source.read_keys() if has_input else source.flush_keys():
                        if press.key == Keys.Escape:
                            stop()
                        else:
                            captured_presses.append(press)

        thread = threading.Thread(target=watch, name="keys", daemon=True)
        with source.raw_mode():
            mode = termios.tcgetattr(source.fileno())
            mode[3] |= termios.ISIG | termios.NOFLSH  # Ctrl-C is a signal, and drops no input
            termios.tcsetattr(source.fileno(), termios.TCSANOW, mode)
            with suppress(OSError):
                output.enable_bracketed_paste()
                output.flush()
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()
                self._queue_keys(captured_presses)
                with suppress(OSError):
                    output.disable_bracketed_paste()
                    output.flush()

    def _redraw_while_loading(self) -> None:
        """Start a task that redraws the toolbar until the model is loaded.

        It ends the prompt with what `loaded` raises.
        """
        app = self._session.app

        async def watch() -> None:
            """Redraw the toolbar until the model is loaded."""
            try:
                while not self._is_loaded():
                    await asyncio.sleep(0.1)
                    app.invalidate()
            except Exception as error:
                if not app.is_done:
                    app.exit(exception=error)

        app.create_background_task(watch())

    def _toolbar_text(self) -> str:
        """Return the status, or after a first Ctrl-C the hint how to quit."""
        shows_quit_hint = time.monotonic() - self._last_interrupt < QUIT_SECONDS
        return " Ctrl-C again, Ctrl-D or /exit quits" if shows_quit_hint else self._status()

    def _make_key_bindings(self) -> KeyBindings:
        """Return bindings of keys that submit, begin a line, open an editor, paste, interrupt."""
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            queue = event.key_processor.input_queue
            has_more_keys = any(
                len(press.key) == 1 or press.key == Keys.ControlM for press in queue
            )
            # More keys in the queue are a paste that the terminal did not mark.
            if has_more_keys and not _is_continued(buffer):
                buffer.insert_text("\n")
            else:
                _submit_or_continue(buffer)

        @keys.add(TYPED_ENTER)
        def _(event: KeyPressEvent) -> None:
            self._queued_lines -= 1
            _submit_or_continue(event.current_buffer)

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
            event.current_buffer.insert_text(self._shown_paste(event.data))

        @keys.add("c-c")
        @keys.add("<sigint>")
        def _(event: KeyPressEvent) -> None:
            now = time.monotonic()
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif now - self._last_interrupt < QUIT_SECONDS:
                event.app.exit(exception=KeyboardInterrupt)
            else:
                self._last_interrupt = now

        return keys

    def _shown_paste(self, pasted: str) -> str:
        """Return a paste as the message shows it: its text, or a placeholder if it has many lines.

        The text behind a placeholder is kept, for `expand`.
        """
        text = pasted.replace("\r\n", "\n").replace("\r", "\n")
        lines = len(text.splitlines())
        if lines <= MAX_INLINE_PASTE_LINES:
            return text
        placeholder = f"[paste {len(self._pastes) + 1}: {lines:,} lines]"
        self._pastes[placeholder] = text
        return placeholder


def _submit_or_continue(buffer: Buffer) -> None:
    """Submit the message, or replace a backslash at its end by a line end."""
    if _is_continued(buffer):
        buffer.delete_before_cursor(1)
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def _is_continued(buffer: Buffer) -> bool:
    """True if a message ends with a backslash at the cursor, which continues it on another line."""
    return buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end


def _count_readable_bytes(descriptor: int) -> int:
    """Return how many bytes can be read from a terminal without waiting."""
    count = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(count[0])


class _ExpandedHistory(FileHistory):
    """A history file that only its owner can read, with pastes in full instead of placeholders.

    `warn` is called with a message if the file cannot be written.
    """

    def __init__(
        self, path: Path, expand: Callable[[str], str], warn: Callable[[str], None]
    ) -> None:
        """Create the file and its folder where they are missing."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            path.open("r+b").close()
        except OSError as error:
            warn(f"what you type is not kept for the next chat: {path}: {error.strerror}")
        super().__init__(str(path))
        self._expand = expand

    def load_history_strings(self) -> Iterable[str]:
        """Read the messages of the file, the latest first; none where it cannot be read."""
        try:
            return super().load_history_strings()
        except OSError:  # the chat began with a warning about it
            return []

    def append_string(self, string: str) -> None:
        """Add a message with its pastes in full, in memory and to the file."""
        super().append_string(self._expand(string))

    def store_string(self, string: str) -> None:
        """Append a message to the file, unless that fails."""
        with suppress(OSError, UnicodeError):  # a full disk must not lose the message
            super().store_string(string)


class _CommandCompleter(Completer):
    """Completes slash commands and their arguments."""

    def __init__(self, commands: Mapping[str, CompletionSource | None]) -> None:
        self._commands = commands

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """Yield completions of the command or argument before the cursor."""
        command, blank, arguments = document.text_before_cursor.partition(" ")
        word = arguments.rsplit(" ", 1)[-1] if blank else command
        if not command.startswith("/") or (blank and command not in self._commands):
            return
        candidates = self._commands[command] if blank else self._commands.keys
        if candidates is None:
            yield from PathCompleter(expanduser=True).get_completions(
                Document(word), complete_event
            )
        else:
            for candidate in candidates():
                if candidate.startswith(word):
                    yield Completion(candidate, -len(word))

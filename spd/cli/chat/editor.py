"""Line editing for chats on a terminal; the only module that imports prompt_toolkit."""

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
from spd.cli.signals import Interrupted

CHIP_LINES = 20
"""Pasted lines above which a paste is shown as one word."""
TWICE_SECONDS = 2.0
ESCAPE_SECONDS = 0.05
"""How long nothing may follow an Esc: what another key sends comes at once."""
TYPED_ENTER = Keys.F24
"""Stands for an Enter that was pressed while spd was busy: it sends its line, whatever follows."""

Words = Callable[[], Iterable[str]]
"""What may be typed behind a command."""


class Editor:
    """Line editing on a terminal, with a bottom line that shows `status`.

    It is drawn anew until `loaded` says True; what that raises ends `read`. `commands` are completed, and
    what stands behind them: by words, or as a path where there are none.
    """

    def __init__(
        self,
        history: Path,
        *,
        color: bool,
        status: Callable[[], str],
        warn: Callable[[str], None],
        loaded: Callable[[], bool],
        commands: Mapping[str, Words | None],
    ) -> None:
        self._status = status
        self._loaded = loaded
        self._pastes: dict[str, str] = {}
        self._draft = ""
        """What was refused, while lines that were typed meanwhile are still to be read."""
        self._ahead = 0
        """Lines that were typed while spd was busy and have not been read."""
        self._interrupted = -TWICE_SECONDS
        self._session: PromptSession[str] = PromptSession(
            PROMPT,
            multiline=True,
            prompt_continuation="  ",
            history=_WholeHistory(history, self.expand, warn),
            enable_history_search=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            complete_while_typing=False,
            completer=_CommandCompleter(commands),
            key_bindings=self._bindings(),
            bottom_toolbar=self._bottom,
            color_depth=None if color else ColorDepth.DEPTH_1_BIT,
            reserve_space_for_menu=4,
        )

    def read(self, draft: str = "") -> str | None:
        """Return the next message, or None at the end. Raises Interrupted after a second Ctrl-C.

        Lines that were typed while spd was busy come first, one by one. A `draft`, which was refused,
        waits until they are read; those that are no commands are added to it, for it came before them.
        """
        self._keep_cooked_lines()
        draft = "\n".join(filter(None, (self._draft, draft)))
        self._draft = ""
        while draft and self._ahead:
            text = self._prompt("")
            if text is None or is_command(text):
                self._draft = draft
                return text
            draft = "\n".join(filter(None, (draft, text)))
        return self._prompt(draft)

    def _prompt(self, draft: str) -> str | None:
        """Return what is typed behind a draft, or None at the end."""
        for chip, pasted in self._pastes.items():  # a refused message comes back as it stood
            draft = draft.replace(pasted, chip)
        try:
            text = self._session.prompt(default=draft, pre_run=self._watch_loading)
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        return self.expand(text)

    def expand(self, text: str) -> str:
        """Text with every paste in its own words."""
        for chip, pasted in self._pastes.items():
            text = text.replace(chip, pasted)
        return text

    def _keep_cooked_lines(self) -> None:
        """Keep whole lines that were typed while the terminal was in its usual mode."""
        source = self._session.input
        presses = list[KeyPress]()
        with suppress(OSError, ValueError, termios.error):
            while self._is_cooked() and _waiting_bytes(source.fileno()):
                presses += source.read_keys()
        for number, press in enumerate(presses):
            if press.key == Keys.ControlJ:  # as the terminal passes Enter on
                presses[number] = KeyPress(Keys.ControlM, press.data)
        self._keep(presses)

    def _is_cooked(self) -> bool:
        """True if the terminal hands out whole lines."""
        local_flags: int = termios.tcgetattr(self._session.input.fileno())[3]
        return bool(local_flags & termios.ICANON)

    def _keep(self, presses: list[KeyPress]) -> None:
        """Keep keys for the next messages; each Enter among them ends one."""
        for number, press in enumerate(presses):
            if press.key == Keys.ControlM:
                presses[number] = KeyPress(TYPED_ENTER, "")
                self._ahead += 1
        store_typeahead(self._session.input, presses)

    @contextmanager
    def replying(self, stop: Callable[[], None]) -> Iterator[None]:
        """Keep keys that are typed inside off the screen, for the next messages; Esc calls `stop`."""
        self._keep_cooked_lines()
        source = self._session.input
        output = self._session.output
        done = threading.Event()
        kept = list[KeyPress]()

        def watch() -> None:
            with suppress(OSError, ValueError):  # a terminal that has gone types nothing
                while not done.is_set() and not source.closed:
                    typed = select.select([source.fileno()], [], [], ESCAPE_SECONDS)[0]
                    for press in source.read_keys() if typed else source.flush_keys():
                        if press.key == Keys.Escape:
                            stop()
                        else:
                            kept.append(press)

        thread = threading.Thread(target=watch, name="keys", daemon=True)
        with source.raw_mode():
            mode = termios.tcgetattr(source.fileno())
            mode[3] |= termios.ISIG | termios.NOFLSH  # Ctrl-C is a signal, and drops nothing typed
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
                self._keep(kept)
                with suppress(OSError):
                    output.disable_bracketed_paste()
                    output.flush()

    def _watch_loading(self) -> None:
        app = self._session.app

        async def watch() -> None:
            try:
                while not self._loaded():
                    await asyncio.sleep(0.1)
                    app.invalidate()
            except Exception as error:
                if not app.is_done:
                    app.exit(exception=error)

        app.create_background_task(watch())

    def _bottom(self) -> str:
        hinted = time.monotonic() - self._interrupted < TWICE_SECONDS
        return " Ctrl-C again, Ctrl-D or /exit quits" if hinted else self._status()

    def _bindings(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            queue = event.key_processor.input_queue
            more = any(len(press.key) == 1 or press.key == Keys.ControlM for press in queue)
            if more and not _continues(buffer):  # a paste that the terminal did not mark
                buffer.insert_text("\n")
            else:
                _send(buffer)

        @keys.add(TYPED_ENTER)
        def _(event: KeyPressEvent) -> None:
            self._ahead -= 1
            _send(event.current_buffer)

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
            now = time.monotonic()
            if event.current_buffer.text:
                event.current_buffer.reset()
            elif now - self._interrupted < TWICE_SECONDS:
                event.app.exit(exception=KeyboardInterrupt)
            else:
                self._interrupted = now

        return keys

    def _chip(self, pasted: str) -> str:
        """A paste as it is, or one word for it if it is long."""
        text = pasted.replace("\r\n", "\n").replace("\r", "\n")
        lines = len(text.splitlines())
        if lines <= CHIP_LINES:
            return text
        chip = f"[paste {len(self._pastes) + 1}: {lines:,} lines]"
        self._pastes[chip] = text
        return chip


def _send(buffer: Buffer) -> None:
    """Send a message, unless it asks for another line."""
    if _continues(buffer):
        buffer.delete_before_cursor(1)
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


def _continues(buffer: Buffer) -> bool:
    """True if a message ends with a backslash, which asks for another line."""
    return buffer.text.endswith("\\") and buffer.document.is_cursor_at_the_end


def _waiting_bytes(descriptor: int) -> int:
    """Return how many bytes a terminal has to be read."""
    count = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(count[0])


class _WholeHistory(FileHistory):
    """For its owner alone; a long paste is kept whole, not as the word that stood for it.

    `warn` hears where nothing can be kept.
    """

    def __init__(
        self, path: Path, expand: Callable[[str], str], warn: Callable[[str], None]
    ) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            path.open("r+b").close()
        except OSError as error:
            warn(f"what you type is not kept for the next chat: {path}: {error.strerror}")
        super().__init__(str(path))
        self._expand = expand

    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:  # which the chat began with
            return []

    def append_string(self, string: str) -> None:
        super().append_string(self._expand(string))

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):  # a full disk is no reason to lose the message
            super().store_string(string)


class _CommandCompleter(Completer):
    """Completes slash commands, and what stands behind them."""

    def __init__(self, commands: Mapping[str, Words | None]) -> None:
        self._commands = commands

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        command, blank, rest = document.text_before_cursor.partition(" ")
        word = rest.rsplit(" ", 1)[-1] if blank else command
        if not command.startswith("/") or (blank and command not in self._commands):
            return
        words = self._commands[command] if blank else self._commands.keys
        if words is None:
            yield from PathCompleter(expanduser=True).get_completions(
                Document(word), complete_event
            )
        else:
            yield from (Completion(each, -len(word)) for each in words() if each.startswith(word))

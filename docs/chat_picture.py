"""Draw the README's picture: `python docs/chat_picture.py > docs/chat.svg`.

Runs a chat with the demo in a tmux terminal, with accepted drafts coloured, and draws its screen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

COLUMNS = 92
ROWS = 24
QUESTIONS = ("What does os.path.join do?", "What does os.path.exists do?")
FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def tmux(*arguments: str) -> str:
    """Run a command of a private tmux server and return its output."""
    command = ["tmux", "-L", f"spd-picture-{os.getpid()}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_for(pattern: str, times: int, seconds: float = 60) -> None:
    """Return once `pattern` has appeared that many times. Raises TimeoutError after `seconds`."""
    end = time.monotonic() + seconds
    while len(re.findall(pattern, tmux("capture-pane", "-p"))) < times:
        if time.monotonic() > end:
            raise TimeoutError(tmux("capture-pane", "-p"))
        time.sleep(0.2)
    time.sleep(1)  # until the prompt is drawn


def run_chat() -> str:
    """Return the terminal's screen after all questions were answered, with its escape sequences."""
    with tempfile.TemporaryDirectory() as state:
        command = f"XDG_STATE_HOME={state} {sys.executable} -m spd chat --show-drafts --seed 7"
        tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), command)
        try:
            wait_for("demo · spec", 1)
            for index, question in enumerate(QUESTIONS):
                tmux("send-keys", question, "Enter")
                wait_for("tok/round", index + 1)
            return tmux("capture-pane", "-e", "-p")
        finally:
            tmux("kill-server")


def render_svg(screen: str) -> str:
    """Return the picture of a terminal's screen without its blank rows."""
    lines = [line for line in screen.splitlines() if Text.from_ansi(line).plain.strip()]
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi("\n".join(lines)), end="")
    return console.export_svg(
        title="spd chat --show-drafts", code_format=FONT_FACE.sub("", CONSOLE_SVG_FORMAT)
    )


if __name__ == "__main__":
    print(render_svg(run_chat()))

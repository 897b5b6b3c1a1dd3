"""The executable: `spd` and `python -m spd`.

Owns the first milliseconds: the version is answered before anything is imported.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress


def main() -> int:
    """Run the command line and end with its exit status; the version's is returned."""
    if sys.argv[1:] in (["-V"], ["--version"]) and sys.stdout is not None:
        from spd.version import __version__

        with suppress(OSError):  # which the command line says
            print(f"spd {__version__}", flush=True)
            return 0
    gc.set_threshold(100_000)  # a short run ends before anything is worth collecting
    try:
        from spd.cli.app import main as run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # only before the command line has taken the signals over
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    os._exit(
        status
    )  # an interpreter's own end takes a fifth of a short run, and aborts around an engine


if __name__ == "__main__":
    sys.exit(main())

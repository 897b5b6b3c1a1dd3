"""The executable: `spd` and `python -m spd`. The version is printed before anything is imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress

UNUSED_BY_ENGINES = "torch._meta_registrations"
"""Operations on tensors without data, for torch's compilers: a quarter of torch's import."""
NVIDIA_DEVICE = "/dev/nvidiactl"
"""The file that exists where NVIDIA's driver is loaded."""
RARELY_USED = ("inspect", "ipaddress", "selectors")
"""Modules that `dataclasses`, `pathlib`, `socket` import, seldom used: an eighth of a start.

Both kinds are put off until they are used.
"""


def main() -> int:
    """Run the command line and end the process at once with its exit status.

    Returns a status only for --version alone, which it prints, and after an early interrupt.
    """
    if sys.argv[1:] in (["-V"], ["--version"]) and sys.stdout is not None:
        from spd.version import __version__

        with suppress(OSError):  # the command line reports it
            print(f"spd {__version__}", flush=True)
            return 0
    gc.set_threshold(100_000)  # a short run ends before there is much garbage
    try:
        from spd.lazy_names import DeferredModule

        for name in RARELY_USED:
            DeferredModule.install(name)
        if not os.path.exists(NVIDIA_DEVICE):  # deferring is untried with CUDA
            DeferredModule.install(UNUSED_BY_ENGINES)
        from spd.cli.app import main as run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # only before the command line handles the signals
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        return 130
    # The interpreter's shutdown takes a fifth of a short run, and aborts around an engine.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())

"""stderr stays empty where nothing is wrong: a torch without NumPy warns, and spd does not pass it on."""

from __future__ import annotations

import subprocess
import sys


def test_a_missing_numpy_is_no_news() -> None:
    code = (
        "import warnings; from spd.cli.app import main; main(['completions', 'bash']); "
        "warnings.warn('Failed to initialize NumPy: No module named numpy'); warnings.warn('other news')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "NumPy" not in done.stderr and "other news" in done.stderr

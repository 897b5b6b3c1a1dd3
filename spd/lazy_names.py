"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any


def make_lazy_getattr(package: str, homes: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module that is the home of a name.

    homes: the names of each module below the package.
    """

    def find(name: str) -> Any:
        for home, names in homes.items():
            if name in names:
                with warnings.catch_warnings():
                    # torch says so on import where NumPy is absent; spd does not need it.
                    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
                    return getattr(importlib.import_module(f"{package}.{home}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find

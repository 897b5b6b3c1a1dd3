"""Public names of a package that are imported when they are first used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any


def make_lazy_getattr(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module of a name.

    modules: the names of each module below the package.
    """

    def import_name(name: str) -> Any:
        for module, names in modules.items():
            if name in names:
                with warnings.catch_warnings():
                    # torch warns on import where NumPy is absent; spd does not need it.
                    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
                    return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return import_name

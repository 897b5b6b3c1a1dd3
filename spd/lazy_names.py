"""Names and modules that are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any


def make_lazy_getattr(package: str, modules: Mapping[str, Collection[str]]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports the module of a name and returns its value.

    modules: the names that each module below the package has.
    """

    def import_name(name: str) -> Any:
        """Return the value of a name. Raises AttributeError if no module has it."""
        for module, names in modules.items():
            if name in names:
                with warnings.catch_warnings():
                    # torch warns on import where NumPy is absent; spd does not need it.
                    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
                    return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return import_name


class DeferredModule(ModuleType):
    """Stands for a module that others import, and imports it when one of its names is used."""

    @classmethod
    def install(cls, name: str) -> None:
        """Put a deferred module into `sys.modules`, unless the module of the name is in it."""
        sys.modules.setdefault(name, cls(name))

    def __getattr__(self, name: str) -> Any:
        """Import the module and return the value of its name.

        Raises AttributeError if the module lacks it, and for names that begin with two underscores.
        """
        if name.startswith("__"):  # asked by the import system and by `inspect`
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)

"""Print the requirements of pyproject.toml, including those for development, without upper pins.

    python .github/newest.py > newest.txt && pip install -r newest.txt && pip install --no-deps .

Needs Python 3.11 and the package `packaging`.
"""

from __future__ import annotations

from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

UPPER = ("<", "<=", "==", "~=")


def without_upper_pin(text: str) -> str:
    """Return a requirement with its lower bounds only."""
    requirement = Requirement(text)
    lower = [
        str(specifier) for specifier in requirement.specifier if specifier.operator not in UPPER
    ]
    requirement.specifier = SpecifierSet(",".join(lower))
    return str(requirement)


def main() -> None:
    """Print one requirement per line."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        print(without_upper_pin(text))


if __name__ == "__main__":
    main()

"""Which files of a repository or folder are one model: a GGUF file, or its splits, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spd.errors import UsageError
from spd.formats.json_file import abbreviate, display_text

SUFFIX = ".gguf"
COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""Parts of the names of files that go with a model and are none."""
MTP = "mtp-"
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)
_USUAL = ("Q8_0", "BF16", "F16")
"""Quantizations of a drafter's file, the first one that is there."""


@dataclass(frozen=True)
class FileSet:
    """One model among files."""

    files: tuple[str, ...]
    """Their paths, in order."""
    quantization: str
    """As the name says, in capitals; empty where it does not."""
    nbytes: int
    expected: int
    """How many files there are of it, whether here or not."""

    @property
    def stem(self) -> str:
        """Return the name of the first file, without folder and ending."""
        return _stem(self.files[0]).rpartition("/")[2]

    @property
    def tag(self) -> str:
        """Return the word that is typed behind a colon to choose it."""
        return self.quantization or self.stem

    def matches_tag(self, tag: str) -> bool:
        """True if a tag means this set: its quantization, with or without UD-, or its name."""
        lowered = tag.casefold().removesuffix(SUFFIX)
        names = (self.quantization, self.quantization.removeprefix("UD-"), self.stem)
        return lowered in (name.casefold() for name in names if name)


def file_sets(sizes: Mapping[str, int]) -> list[FileSet]:
    """Return the models among files, given by path with their bytes: the smallest first."""
    return _grouped({name: size for name, size in sizes.items() if not is_companion(name)})


def find_drafter(sizes: Mapping[str, int], chosen: FileSet) -> FileSet | None:
    """Return the MTP layers that lie beside a model as a file of their own; None without any."""
    drafters = _grouped({name: size for name, size in sizes.items() if _base(name).startswith(MTP)})
    by_quantization = {drafter.quantization: drafter for drafter in drafters}
    for name in (chosen.quantization, *_USUAL):
        if name in by_quantization:
            return by_quantization[name]
    return next(iter(drafters), None)


def choose(sets: Iterable[FileSet], tag: str) -> list[FileSet]:
    """Return the sets that a tag means; a set whose quantization is exactly that goes before others."""
    answering = [file_set for file_set in sets if file_set.matches_tag(tag)]
    lowered = tag.casefold()
    exact = [file_set for file_set in answering if file_set.quantization.casefold() == lowered]
    return exact if len(exact) == 1 else answering


def choose_one(sets: list[FileSet], name: str, tag: str | None, free: int) -> FileSet:
    """Return the set that is meant of a repository's. Raises UsageError with a list of them otherwise.

    free: bytes of memory for a model, which tell what fits.
    """
    chosen = sets if tag is None else choose(sets, tag)
    if len(chosen) == 1:
        return chosen[0]
    fitting = [file_set for file_set in sets if required_memory(file_set) <= free]
    best = fitting[-1:] or sets[:1]
    lines = [_line(file_set, free) for file_set in sets]
    message = f"{name}: holds {len(sets)} models as GGUF, one of which is to be chosen"
    if tag is not None and not chosen:
        message = f"{name}: has no GGUF file {display_text(tag)}"
    fix = [f"spd pull {name}:{file_set.tag}" for file_set in best]
    raise UsageError(message, reason=abbreviate(lines, 40), fix=fix, code="choose_file")


def required_memory(chosen: FileSet) -> int:
    """Return about how many bytes of memory a model takes with a short context."""
    return chosen.nbytes + chosen.nbytes // 10 + (1 << 28)


def is_companion(name: str) -> bool:
    """True if a file goes with a model and is none: projector, importance matrix, drafter."""
    base = _base(name)
    return any(part in base for part in COMPANIONS)


def _line(file_set: FileSet, free: int) -> str:
    """Return size, whether it fits, and tag of a set."""
    fits = "fits" if required_memory(file_set) <= free else "does not fit"
    return f"{file_set.nbytes / (1 << 30):>5.2f} GiB  {fits:12}  {file_set.tag}"


def _base(name: str) -> str:
    return name.rpartition("/")[2].casefold()


def _stem(name: str) -> str:
    """Return a path without its ending and without the number of a split."""
    stem = name[: -len(SUFFIX)]
    split = _SPLIT.fullmatch(stem)
    return split[1] if split else stem


def _grouped(sizes: Mapping[str, int]) -> list[FileSet]:
    """Return files together that are splits of one, the smallest set first."""
    members: dict[tuple[str, int], list[str]] = {}
    for name in sorted(sizes):
        if not name.casefold().endswith(SUFFIX):
            continue
        split = _SPLIT.fullmatch(name[: -len(SUFFIX)])
        count = int(split[3]) if split else 1
        members.setdefault((_stem(name), count), []).append(name)
    sets = []
    for (stem, count), names in members.items():
        named = _QUANTIZATION.search(stem)
        total = sum(sizes[name] for name in names)
        quantization = named[1].upper() if named else ""
        sets.append(FileSet(tuple(names), quantization, total, count))
    return sorted(sets, key=lambda file_set: (file_set.nbytes, file_set.files))

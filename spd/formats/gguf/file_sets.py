"""Models among the files of a repository or folder: GGUF files, or their splits, by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from spd.errors import UsageError
from spd.formats.json_file import abbreviate, display_text

GGUF_SUFFIX = ".gguf"
COMPANIONS = ("mmproj", "imatrix")
"""Parts of the names of files that accompany a model and are none."""
MTP_PREFIX = "mtp-"
DRAFTER_PREFIXES = (MTP_PREFIX, "eagle3-", "dflash-", "dspark-")
"""The beginnings of the names of files of drafters alone."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)
_DRAFTER_QUANTIZATIONS = ("Q8_0", "BF16", "F16")
"""Quantizations of a drafter's file, the preferred first."""


@dataclass(frozen=True)
class FileSet:
    """One model among files."""

    files: tuple[str, ...]
    """Their paths, in order."""
    quantization: str
    """From the name, in capitals; empty where the name has none."""
    nbytes: int
    """Bytes of the files that are there."""
    expected: int
    """The number of its files, missing ones included."""

    @property
    def stem(self) -> str:
        """Return the name of the first file, without folder and ending."""
        return _set_stem(self.files[0]).rpartition("/")[2]

    @property
    def tag(self) -> str:
        """Return the text behind a colon that chooses it."""
        return self.quantization or self.stem

    def matches_tag(self, tag: str) -> bool:
        """True if a tag chooses this set: its quantization, with or without UD-, or its name."""
        lowered = tag.casefold().removesuffix(GGUF_SUFFIX)
        names = (self.quantization, self.quantization.removeprefix("UD-"), self.stem)
        return lowered in (name.casefold() for name in names if name)


def file_sets(sizes: Mapping[str, int]) -> list[FileSet]:
    """Return the models among files, the smallest first; sizes: bytes by path."""
    return _group_files({name: size for name, size in sizes.items() if not is_companion(name)})


def find_drafter(sizes: Mapping[str, int], chosen: FileSet) -> FileSet | None:
    """Return the file of MTP layers that accompanies a model; None without any."""
    drafters = _group_files(
        {name: size for name, size in sizes.items() if _base_name(name).startswith(MTP_PREFIX)}
    )
    by_quantization = {drafter.quantization: drafter for drafter in drafters}
    for name in (chosen.quantization, *_DRAFTER_QUANTIZATIONS):
        if name in by_quantization:
            return by_quantization[name]
    return next(iter(drafters), None)


def choose_by_tag(sets: Iterable[FileSet], tag: str) -> list[FileSet]:
    """Return the sets that a tag chooses, or the only one of exactly this quantization."""
    matching = [file_set for file_set in sets if file_set.matches_tag(tag)]
    lowered = tag.casefold()
    exact = [file_set for file_set in matching if file_set.quantization.casefold() == lowered]
    return exact if len(exact) == 1 else matching


def choose_one_set(sets: list[FileSet], name: str, tag: str | None, free_bytes: int) -> FileSet:
    """Return the set that a tag chooses. Raises UsageError, with a list of all, if it is not one.

    free_bytes: memory for a model, for the list and the suggested choice.
    """
    chosen = sets if tag is None else choose_by_tag(sets, tag)
    if len(chosen) == 1:
        return chosen[0]
    fitting = [file_set for file_set in sets if required_memory(file_set) <= free_bytes]
    suggested = fitting[-1:] or sets[:1]
    lines = [_set_line(file_set, free_bytes) for file_set in sets]
    message = f"{name}: holds {len(sets)} models as GGUF, one of which is to be chosen"
    if tag is not None and not chosen:
        message = f"{name}: has no GGUF file {display_text(tag)}"
    fix = [f"spd pull {name}:{file_set.tag}" for file_set in suggested]
    raise UsageError(message, reason=abbreviate(lines, 40), fix=fix, code="choose_file")


def required_memory(chosen: FileSet) -> int:
    """Return an estimate of the memory of a model with a short context, in bytes."""
    return chosen.nbytes + chosen.nbytes // 10 + (1 << 28)


def is_companion(name: str) -> bool:
    """True if a file accompanies a model and is none: projector, importance matrix, drafter."""
    base_name = _base_name(name)
    is_drafter = base_name.startswith(DRAFTER_PREFIXES)
    return is_drafter or any(part in base_name for part in COMPANIONS)


def _set_line(file_set: FileSet, free_bytes: int) -> str:
    """Return a line with a set's size, whether it fits, and its tag."""
    fits = "fits" if required_memory(file_set) <= free_bytes else "does not fit"
    return f"{file_set.nbytes / (1 << 30):>5.2f} GiB  {fits:12}  {file_set.tag}"


def _base_name(name: str) -> str:
    """Return the last part of a path in lower case."""
    return name.rpartition("/")[2].casefold()


def _set_stem(name: str) -> str:
    """Return a path without its ending and without the number of a split."""
    stem = name[: -len(GGUF_SUFFIX)]
    split = _SPLIT.fullmatch(stem)
    return split[1] if split else stem


def _group_files(sizes: Mapping[str, int]) -> list[FileSet]:
    """Return the GGUF files as sets, the smallest first.

    A set is a file alone, or the splits of one model, even if some are missing.
    """
    members: dict[tuple[str, int | None], list[str]] = {}
    for name in sorted(sizes):
        if not name.casefold().endswith(GGUF_SUFFIX):
            continue
        split = _SPLIT.fullmatch(name[: -len(GGUF_SUFFIX)])
        count = int(split[3]) if split else None
        members.setdefault((_set_stem(name), count), []).append(name)
    sets = []
    for (stem, count), names in members.items():
        quantization_match = _QUANTIZATION.search(stem)
        total = sum(sizes[name] for name in names)
        quantization = quantization_match[1].upper() if quantization_match else ""
        sets.append(FileSet(tuple(names), quantization, total, count or 1))
    return sorted(sets, key=lambda file_set: (file_set.nbytes, file_set.files))

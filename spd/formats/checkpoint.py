"""The weights of a model folder: one `model.safetensors`, or shards listed in an index.

Opening reads and checks headers only (no torch); reading maps tensors through the safetensors library
after making sure that the file is still the one whose header was checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError, safe_open

from spd.errors import CheckpointError
from spd.formats.json_file import listed, names_in, one_line, open_regular_file, read_json_object, shown
from spd.formats.safetensors_header import FileIdentity, ShardHeader, TensorMeta, read_shard_header

if TYPE_CHECKING:
    import torch

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 100_000_000  # bytes
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FLOAT_DTYPES = ("BF16", "F16", "F32")

_NUMBERED = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)


class Checkpoint:
    """The tensors of a model folder by name; a context manager that closes its files.

    `notes` holds remarks for a verbose listing, such as files that the index does not name.
    """

    def __init__(self, folder: Path, headers: Sequence[ShardHeader], notes: Sequence[str] = ()) -> None:
        tensors: dict[str, TensorMeta] = {}
        for header in headers:
            for meta in header.tensors:
                if meta.name in tensors:
                    raise CheckpointError(
                        f"{meta.shard}: tensor {shown(meta.name)}: is in {tensors[meta.name].shard.name} too"
                    )
                tensors[meta.name] = meta
        self.folder = folder
        self.tensors: Mapping[str, TensorMeta] = MappingProxyType(tensors)
        self.shards = tuple(header.path for header in headers)
        self.total_bytes = sum(meta.nbytes for meta in tensors.values())
        self.notes = tuple(notes)
        self._identities = {header.path: header.identity for header in headers}
        self._handles: dict[Path, Any] = {}
        self._stack = ExitStack()

    @classmethod
    def open(cls, folder: Path, wanted: Callable[[str], bool] = lambda name: True) -> Checkpoint:
        """Read and check the headers of all shards; `model.safetensors` wins over an index beside it.

        `wanted` leaves out shards that the index gives none of the wanted tensors; they may be missing.
        Raises `CheckpointError` naming the file and the tensor.
        """
        names = names_in(folder)
        if SINGLE_NAME in names:
            checkpoint = cls(folder, [read_shard_header(folder / SINGLE_NAME)])
        elif INDEX_NAME in names:
            checkpoint = _open_index(cls, folder, names, wanted)
        else:
            raise _no_weights(folder, names)
        if not checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.shards[0]}: holds no tensors")
        return checkpoint

    def read(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file (pages are read when touched), on the CPU.

        The file is compared with what was opened before and after, so that a replaced or truncated file
        is an error instead of foreign bytes. Raises `CheckpointError`.
        """
        meta = self.tensors.get(name)
        if meta is None:
            raise CheckpointError(f"{self.folder}: tensor {shown(name)}: is not in this checkpoint")
        self._check_identity(meta.shard)
        try:
            if meta.shard not in self._handles:
                # The library reads the header again; the check below covers the time in between.
                handle = safe_open(meta.shard, framework="pt", device="cpu")
                self._handles[meta.shard] = self._stack.enter_context(handle)
            tensor: torch.Tensor = self._handles[meta.shard].get_tensor(name)
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
            self._check_identity(meta.shard)
            raise CheckpointError(f"{meta.shard}: tensor {shown(name)}: {one_line(error)}") from None
        self._check_identity(meta.shard)
        return tensor

    def open_shard(self, shard: Path) -> BinaryIO:
        """A shard opened for reading, seen to be the file whose header was checked.

        Raises `CheckpointError`. Who reads from it for long calls `check_unchanged` at the end.
        """
        file = open_regular_file(shard)
        try:
            self._compare(shard, FileIdentity.of(os.fstat(file.fileno())))
        except CheckpointError:
            file.close()
            raise
        return file

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` when any shard is no longer the file that was opened."""
        for shard in self.shards:
            self._check_identity(shard)

    def close(self) -> None:
        """Close the files; tensors already read stay valid."""
        self._handles.clear()
        self._stack.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_identity(self, shard: Path) -> None:
        try:
            now = FileIdentity.of(os.stat(shard))
        except OSError as error:
            raise CheckpointError(f"{shard}: changed while in use: {error.strerror}") from None
        self._compare(shard, now)

    def _compare(self, shard: Path, now: FileIdentity) -> None:
        opened = self._identities[shard]
        if now != opened:
            what = f"{opened.size} bytes became {now.size}" if now.size != opened.size else "it was replaced"
            raise CheckpointError(f"{shard}: changed while in use: {what}")


def shards_by_tensor(folder: Path) -> Mapping[str, str]:
    """The file name of every tensor's shard as the index gives it, without a look into the shards.

    Raises `CheckpointError` as `Checkpoint.open` does.
    """
    names = names_in(folder)
    if SINGLE_NAME not in names and INDEX_NAME in names:
        return _weight_map(folder / INDEX_NAME)
    with Checkpoint.open(folder) as checkpoint:
        return {name: meta.shard.name for name, meta in checkpoint.tensors.items()}


def _weight_map(path: Path) -> dict[str, str]:
    """The shard of every tensor, the shards' names seen to be harmless."""
    weight_map = read_json_object(path, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: is not an object that names a shard for each tensor")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{path}: weight_map: {shown(tensor)}: {shown(shard)} is not a string")
    for shard in sorted(set(weight_map.values())):
        _check_shard_name(path, shard)
    return weight_map


def _open_index(
    kind: type[Checkpoint], folder: Path, names: Sequence[str], wanted: Callable[[str], bool]
) -> Checkpoint:
    path = folder / INDEX_NAME
    whole = _weight_map(path)
    shards = sorted({shard for tensor, shard in whole.items() if wanted(tensor)})
    opened = set(shards)
    weight_map = {tensor: shard for tensor, shard in whole.items() if shard in opened}
    if len({shard.casefold() for shard in shards}) < len(shards):
        raise CheckpointError(f"{path}: weight_map: names shards that differ in upper and lower case only")
    missing = [shard for shard in shards if shard not in names]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(shards)} shards are missing: {', '.join(listed(missing))}",
            reason=("an interrupted download looks like this",),
        )
    headers = [read_shard_header(folder / shard) for shard in shards]
    checkpoint = kind(folder, headers, _notes(sorted(set(whole.values())), names))
    _compare_with_index(path, weight_map, checkpoint)
    return checkpoint


def _check_shard_name(path: Path, shard: str) -> None:
    """Refuse what could leave the folder under POSIX or Windows rules, and every format but safetensors."""
    where = f"{path}: weight_map: {shown(shard)}"
    if shard.lower().endswith(PICKLE_SUFFIXES):
        raise CheckpointError(f"{where}: pickle formats are not supported, only safetensors is")
    if (
        re.search(r'[/\\:*?"<>|\x00-\x1f\x7f]', shard)
        or not shard.isprintable()
        or shard.startswith(".")
        or _WINDOWS_DEVICE.match(shard)
    ):
        raise CheckpointError(f"{where}: is not a plain file name")
    if not shard.endswith(".safetensors"):
        raise CheckpointError(f"{where}: does not end in .safetensors")


def _notes(shards: Sequence[str], names: Sequence[str]) -> list[str]:
    unlisted = [name for name in names if name.endswith(".safetensors") and name not in shards]
    notes = [f"not in the index, ignored: {shown(name)}" for name in unlisted]
    totals = {int(match[2]) for shard in shards if (match := _NUMBERED.fullmatch(shard))}
    if totals and totals != {len(shards)}:
        counts = " and ".join(str(total) for total in sorted(totals))
        notes.append(f"shard names speak of {counts} shards, the index lists {len(shards)}")
    return notes


def _compare_with_index(path: Path, weight_map: Mapping[str, str], checkpoint: Checkpoint) -> None:
    wrong = []
    for name, shard in weight_map.items():
        meta = checkpoint.tensors.get(name)
        if meta is None:
            wrong.append(f"{shown(name)}: is not in {shard}")
        elif meta.shard.name != shard:
            wrong.append(f"{shown(name)}: is in {meta.shard.name}, not in {shard}")
    wrong += [f"{shown(name)}: is not in the index" for name in checkpoint.tensors if name not in weight_map]
    if wrong:
        raise CheckpointError(
            f"{path}: weight_map: disagrees with the shards about {len(wrong)} tensors, first {wrong[0]}",
            reason=listed(wrong),
        )


def _no_weights(folder: Path, names: Sequence[str]) -> CheckpointError:
    pickles = [name for name in names if name.lower().endswith(PICKLE_SUFFIXES)]
    if pickles:
        return CheckpointError(
            f"{folder / pickles[0]}: pickle formats are not supported, only safetensors is",
            reason=[
                "A pickle can run code; torch's weights_only reads the tensors of one without running any."
            ],
            fix=["a repository with safetensors", *_conversion(folder / pickles[0])],
        )
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        return CheckpointError(f"{folder / ggufs[0]}: GGUF is not supported, safetensors is")
    return CheckpointError(f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}")


def _conversion(pickle: Path) -> list[str]:
    """The command that writes a pickle's tensors as safetensors beside it.

    None for shards of several, and where a shell would read the path as something else.
    """
    if pickle.stem != "pytorch_model" or set(str(pickle)) & set("'\"$`\\!"):
        return []
    read = f"torch.load('{pickle}', weights_only=True, map_location='cpu')"
    tensors = f"{{n: t.contiguous() for n, t in {read}.items()}}"
    to = pickle.with_name(SINGLE_NAME)
    return [f"python -c \"import torch, safetensors.torch as s; s.save_file({tensors}, '{to}')\""]


def _at(meta: TensorMeta) -> str:
    return f"{shown(meta.name)} in {meta.shard.name}"


def check_tensors(
    checkpoint: Checkpoint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    ignorable: Callable[[str], bool] = lambda name: False,
    dtypes: Sequence[str] = FLOAT_DTYPES,
    what: str = "tensors",
    fix: Sequence[str] = (),
) -> list[str]:
    """Compare names, shapes and dtypes with what the model needs; returns unexpected names.

    `ignorable` says which unexpected names need no mention; `what` the expected ones are called in the
    error, and `fix` is what it proposes. Raises ONE `CheckpointError` that lists every
    missing, mis-shaped or wrongly typed tensor (20 at most, then their number).
    """
    missing, shapes, types = [], [], []
    for name, shape in expected.items():
        meta = checkpoint.tensors.get(name)
        if meta is None:
            missing.append(f"{shown(name)}: is missing")
            continue
        if meta.shape != tuple(shape):
            shapes.append(f"{_at(meta)}: shape is {list(meta.shape)}, expected {list(shape)}")
        if meta.dtype not in dtypes:
            types.append(f"{_at(meta)}: dtype {meta.dtype} is not supported here ({', '.join(dtypes)} are)")
    problems = missing + shapes + types
    if problems:
        kinds = ((missing, "missing"), (shapes, "of another shape"), (types, "of an unsupported dtype"))
        counts = ", ".join(f"{len(found)} {words}" for found, words in kinds if found)
        raise CheckpointError(
            f"{checkpoint.folder}: {len(expected)} {what} are needed: {counts}; first: {problems[0]}",
            reason=listed(problems),
            fix=fix,
        )
    return [name for name in checkpoint.tensors if name not in expected and not ignorable(name)]

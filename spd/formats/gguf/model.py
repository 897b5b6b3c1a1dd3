"""A GGUF file as a model: configuration, tensors, tokenizer and template, as a folder has them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from spd.formats.checkpoint import FLOAT_DTYPES, TORCH_NAMES, Checkpoint, read_exactly
from spd.formats.gguf.block_types import READABLE_TYPES
from spd.formats.gguf.config import (
    count_types,
    general_texts,
    read_architecture,
    read_config,
)
from spd.formats.gguf.container import GgufFile, GgufTensor
from spd.formats.gguf.sampling import read_sampling
from spd.formats.gguf.tensors import StoredTensor, stored_tensors
from spd.formats.gguf.vocabulary import Vocabulary, has_vocabulary
from spd.formats.json_file import Fields, abbreviate, display_text
from spd.formats.safetensors_header import TensorMeta

if TYPE_CHECKING:
    from torch import Tensor

    from spd.formats.chat_template import ChatTemplate
    from spd.formats.model_config import GenerationConfig
    from spd.formats.tokenizer import Tokenizer
    from spd.formats.tokenizer_config import TokenizerConfig


class GgufCheckpoint(Checkpoint):
    """A file's tensors by Hugging Face's names.

    `read` returns floats only, `stored` describes all tensors.
    """

    dtypes = READABLE_TYPES
    refuses_unused = True

    def __init__(
        self, file: GgufFile, stored: Mapping[str, StoredTensor], unused: list[str]
    ) -> None:
        tensors = {name: _tensor_meta(name, tensor) for name, tensor in stored.items()}
        notes = [f"not used: {display_text(name)}" for name in abbreviate(unused)]
        super().__init__(file.path, tensors, file.identities, notes)
        self.stored: Mapping[str, StoredTensor] = MappingProxyType(dict(stored))

    def read(
        self, name: str, rows: tuple[int, int] | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Read a tensor of floats, or its rows [first, end), as stored; see `Checkpoint.read`.

        Raises CheckpointError for any other tensor.
        """
        stored = self.stored.get(name)
        if stored is not None and (stored.changes or stored.parts[0].type.name not in TORCH_NAMES):
            raise self.tensor_error(name, "is not stored as it is meant")
        return super().read(name, rows, into)

    def read_rows(self, tensor: GgufTensor, first: int, count: int) -> Tensor:
        """Read rows of a tensor of the file as they are stored: uint8 [count, bytes of a row]."""
        import torch

        row_bytes = tensor.type.row_bytes(tensor.shape[-1])
        rows = torch.empty(count, row_bytes, dtype=torch.uint8)
        memory = memoryview((ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr()))
        offset = tensor.offset + first * row_bytes
        read_exactly(self.open_shard(tensor.path), memory.cast("B"), offset, tensor.path)
        return rows


def _tensor_meta(name: str, tensor: StoredTensor) -> TensorMeta:
    """Return a stored tensor's entry as a folder's header has it.

    Its bytes begin with the first.
    """
    first = tensor.parts[0]
    return TensorMeta(
        name=name,
        dtype=first.type.name,
        shape=tensor.shape,
        shard=first.path,
        nbytes=tensor.nbytes,
        offset=first.offset,
    )


@dataclass(frozen=True)
class GgufModel:
    """A model in a GGUF file, its header read once."""

    file: GgufFile

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read a file's header. Raises CheckpointError."""
        return cls(GgufFile.open(path))

    @cached_property
    def fields(self) -> Fields:
        """Return the keys of `config.json`. Raises CheckpointError for an unknown architecture."""
        return read_config(self.file)

    @cached_property
    def checkpoint(self) -> GgufCheckpoint:
        """Return the tensors. Raises CheckpointError where they do not fit each other."""
        architecture = read_architecture(self.file)[1]
        tensors, unused = stored_tensors(self.file, architecture, self.fields)
        return GgufCheckpoint(self.file, tensors, unused)

    @property
    def is_mtp_head(self) -> bool:
        """True if the file holds the layers of an MTP head and no layer of a model."""
        names = self.file.tensors
        return any(".nextn." in name for name in names) and not any(
            name.startswith("blk.0.") for name in names
        )

    @property
    def packed_types(self) -> tuple[str, ...]:
        """Return the types in few bits of its tensors, the one with most bytes first."""
        return tuple(name for name in count_types(self.file) if name not in FLOAT_DTYPES)

    def describe(self) -> dict[str, object]:
        """Return a description as JSON values: types with numbers of tensors, and `general.*`."""
        return {
            "architecture": read_architecture(self.file)[0],
            "version": self.file.version,
            "types": [f"{count} {name}" for name, count in count_types(self.file).items()],
            "general": general_texts(self.file),
        }

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Return the tokens; None for a file without any. Raises CheckpointError."""
        return Vocabulary.of(self.file) if has_vocabulary(self.file) else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None for a file without one. Raises CheckpointError."""
        from spd.formats.gguf.tokenizer import open_tokenizer

        return None if self.vocabulary is None else open_tokenizer(self.file, self.vocabulary)

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
        """Return special tokens, and whether they are put around a text."""
        from spd.formats.gguf.tokenizer import tokenizer_config
        from spd.formats.tokenizer_config import TokenizerConfig

        if self.vocabulary is None:
            return TokenizerConfig(
                roles={}, additional_tokens=(), add_bos=None, add_eos=None, fields=None
            )
        return tokenizer_config(self.vocabulary)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Return the chat template; None for a file without one. Raises CheckpointError."""
        from spd.formats.gguf.template import read_template

        return read_template(self.file, self.tokenizer_config)

    @cached_property
    def generation(self) -> GenerationConfig:
        """Return the default sampling parameters, and the tokens that end a turn."""
        ends = () if self.vocabulary is None else self.vocabulary.end_ids
        return read_sampling(self.file, ends)

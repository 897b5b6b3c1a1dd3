"""A GGUF file as a model: what a folder of Hugging Face's gives, from one file or its splits."""

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
    architecture_of,
    config_fields,
    general_facts,
    stored_types,
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
    """A file's tensors by Hugging Face's names; `read` gives floats alone, `stored` says what others are."""

    dtypes = READABLE_TYPES
    refuses_unused = True

    def __init__(
        self, file: GgufFile, stored: Mapping[str, StoredTensor], unknown: list[str]
    ) -> None:
        tensors = {name: _meta(name, tensor) for name, tensor in stored.items()}
        notes = [f"not used: {display_text(each)}" for each in abbreviate(unknown)]
        super().__init__(file.path, tensors, file.identities, notes)
        self.stored: Mapping[str, StoredTensor] = MappingProxyType(dict(stored))

    def read(
        self, name: str, rows: tuple[int, int] | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Return a tensor of floats as it is stored, as a folder's. Raises CheckpointError for others."""
        kept = self.stored.get(name)
        if kept is not None and (kept.changes or kept.parts[0].type.name not in TORCH_NAMES):
            raise self.tensor_error(name, "is not stored as it is meant")
        return super().read(name, rows, into)

    def blocks(self, tensor: GgufTensor, first: int, count: int) -> Tensor:
        """Return rows of a part of a tensor as they are stored: uint8 [count, bytes of a row]."""
        import torch

        row = tensor.type.row_bytes(tensor.shape[-1])
        found = torch.empty(count, row, dtype=torch.uint8)
        memory = memoryview((ctypes.c_ubyte * found.nbytes).from_address(found.data_ptr()))
        offset = tensor.offset + first * row
        read_exactly(self.open_shard(tensor.path), memory.cast("B"), offset, tensor.path)
        return found


def _meta(name: str, tensor: StoredTensor) -> TensorMeta:
    first = tensor.parts[0]
    return TensorMeta(name, first.type.name, tensor.shape, first.path, tensor.nbytes, first.offset)


@dataclass(frozen=True)
class GgufModel:
    """A model's file, its header read once."""

    file: GgufFile

    @classmethod
    def open(cls, path: Path) -> GgufModel:
        """Read a file's header. Raises CheckpointError."""
        return cls(GgufFile.open(path))

    @cached_property
    def fields(self) -> Fields:
        """Return what `config.json` would say. Raises CheckpointError for an unknown architecture."""
        return config_fields(self.file)

    @cached_property
    def checkpoint(self) -> GgufCheckpoint:
        """Return the tensors. Raises CheckpointError where they do not fit each other."""
        row = architecture_of(self.file)[1]
        return GgufCheckpoint(self.file, *stored_tensors(self.file, row, self.fields))

    @property
    def packed_types(self) -> tuple[str, ...]:
        """Return the types in few bits that its tensors have, the one of most bytes first."""
        return tuple(name for name in stored_types(self.file) if name not in FLOAT_DTYPES)

    def describe(self) -> dict[str, object]:
        """Return what it says of itself, as JSON values: types with their tensors, and `general.*`."""
        return {
            "architecture": architecture_of(self.file)[0],
            "version": self.file.version,
            "types": [f"{count} {name}" for name, count in stored_types(self.file).items()],
            "general": general_facts(self.file),
        }

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """Return what the file says of tokens; None for one that has none. Raises CheckpointError."""
        return Vocabulary.of(self.file) if has_vocabulary(self.file) else None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer; None for a file without one. Raises CheckpointError."""
        from spd.formats.gguf.tokenizer import open_tokenizer

        return None if self.vocabulary is None else open_tokenizer(self.file, self.vocabulary)

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
        """Return special words, and what is put around a text."""
        from spd.formats.gguf.tokenizer import tokenizer_config
        from spd.formats.tokenizer_config import TokenizerConfig

        if self.vocabulary is None:
            return TokenizerConfig({}, (), None, None, None)
        return tokenizer_config(self.vocabulary)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Return the chat template; None for a file without one. Raises CheckpointError."""
        from spd.formats.gguf.template import read_template

        return read_template(self.file, self.tokenizer_config)

    @cached_property
    def generation(self) -> GenerationConfig:
        """Return how the model wants to be sampled, and the tokens that end a turn."""
        ends = () if self.vocabulary is None else self.vocabulary.end_ids
        return read_sampling(self.file, ends)

"""A model folder, or a GGUF file: its small files are read once, at first use, and cached."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from spd.errors import NotFoundError, SpdError, UsageError
from spd.formats import model_config
from spd.formats.checkpoint import Checkpoint
from spd.formats.gguf.file_kind import is_gguf
from spd.formats.gguf.model import GgufModel
from spd.formats.hub import MODEL_FIX, resolve_model
from spd.formats.json_file import Fields, list_folder
from spd.formats.model_config import GenerationConfig, ModelConfig
from spd.formats.mtp_layout import is_mtp_tensor
from spd.formats.names import CONFIG_FILE, EMBEDDING, HEAD, TOKENIZER_FILE
from spd.formats.quantized import with_quantization

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer
    from spd.formats.tokenizer_config import TokenizerConfig

logger = logging.getLogger(__name__)
"""Logs warnings about files that are odd and not refused."""


@dataclass(frozen=True)
class ModelFolder(os.PathLike[str]):
    """The parts of a model folder. Equal by path; copied and pickled as its path alone.

    Where the path leads to a GGUF file, all parts are read from that file.
    """

    path: Path

    @classmethod
    def from_path(cls, folder: Path | ModelFolder) -> ModelFolder:
        """Return the folder at a path; a ModelFolder is returned as it is."""
        return folder if isinstance(folder, ModelFolder) else cls(folder)

    @classmethod
    def resolve(cls, reference: str) -> ModelFolder:
        """Return the folder of a path or a model's name, which must exist; see `resolve_model`.

        Raises NotFoundError and UsageError.
        """
        return cls(resolve_model(reference))

    @cached_property
    def gguf(self) -> GgufModel | None:
        """The model of a GGUF file; None for a folder. Raises CheckpointError."""
        return GgufModel.open(self.path) if is_gguf(self.path) else None

    @cached_property
    def fields(self) -> Fields:
        """`config.json` as written, or a GGUF file's fields.

        Raises NotFoundError without a configuration.
        """
        if self.gguf is not None:
            return self.gguf.fields
        if CONFIG_FILE not in list_folder(self.path):
            message = f"{self.path}: is no model folder: there is no {CONFIG_FILE}"
            raise NotFoundError(message, fix=[MODEL_FIX])
        return Fields.read(self.path / CONFIG_FILE)

    @cached_property
    def _declared_config(self) -> ModelConfig:
        """The configuration in `config.json`, whatever the weights are."""
        fields = self.fields if self.gguf is not None else with_quantization(self.fields, self.path)
        return model_config.model_config_of(fields)

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of the model or EAGLE-3 head.

        A stored output head overrides the flag for it.
        """
        declared = self._declared_config
        if declared.head_kind is not None:
            return declared
        try:
            tied = self._is_tied(declared.tie_embeddings)
        except SpdError:  # unreadable weights are refused where they are needed
            return declared
        return (
            declared if tied == declared.tie_embeddings else replace(declared, tie_embeddings=tied)
        )

    def _is_tied(self, declared_tied: bool) -> bool:
        """Read the weights; True if the embedding is the output head too, by them and the flag.

        As in transformers, a stored head is used where it differs from the embedding.
        """
        tensors = self.checkpoint.tensors
        if f"{HEAD}_packed" in tensors:
            return False
        if HEAD not in tensors:
            # The flag of a wrapper counts too.
            return declared_tied or self.fields.get("tie_word_embeddings") is True
        if not declared_tied or EMBEDDING not in tensors:
            return declared_tied
        with self.checkpoint as checkpoint:
            is_copy = checkpoint.tensors_equal(HEAD, checkpoint, EMBEDDING)
        if not is_copy:
            message = (
                "%s: tie_word_embeddings is true, but %s is stored and differs: it is the head"
            )
            logger.warning(message, self.path / CONFIG_FILE, HEAD)
        return is_copy

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checked headers of the weights. After closing, tensors can be read again.

        They include MTP layers in a file that the index does not name.
        """
        if self.gguf is not None:
            return self.gguf.checkpoint
        try:
            layers = self._declared_config.num_layers
        except SpdError:
            return Checkpoint.open(self.path)
        return Checkpoint.open(self.path, is_extra=partial(is_mtp_tensor, num_layers=layers))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where the folder has no tokenizer.json."""
        if self.gguf is not None:
            return self.gguf.tokenizer
        from spd.formats.tokenizer import Tokenizer

        has_tokenizer = (self.path / TOKENIZER_FILE).exists()
        return Tokenizer.open(self.path, self.tokenizer_config) if has_tokenizer else None

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
        """The special tokens of the files beside tokenizer.json."""
        from spd.formats.tokenizer_config import read_tokenizer_config

        if self.gguf is not None:
            return self.gguf.tokenizer_config
        return read_tokenizer_config(self.path)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where the folder has none."""
        if self.gguf is not None:
            return self.gguf.template
        from spd.formats.chat_template import ChatTemplate

        return ChatTemplate.open(self.path, self.tokenizer_config)

    @cached_property
    def generation(self) -> GenerationConfig:
        """The default sampling parameters and end ids."""
        if self.gguf is not None:
            return self.gguf.generation
        return model_config.read_generation_config(self.path, vocab_size=self.config.vocab_size)

    def require_folder(self, command: str) -> None:
        """Raise UsageError for a GGUF file: `command` reads safetensors."""
        if self.gguf is not None:
            message = f"{self.path}: is a GGUF file, {command} reads a folder with safetensors"
            raise UsageError(
                message, fix=["the model as it was published, before it was converted"]
            )

    def __fspath__(self) -> str:
        """Return the path as text."""
        return str(self.path)

    __str__ = __fspath__

    def __reduce__(self) -> tuple[type[ModelFolder], tuple[Path]]:
        """Pickle the path alone."""
        return ModelFolder, (self.path,)

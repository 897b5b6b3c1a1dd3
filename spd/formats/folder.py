"""A model folder, or a GGUF file: each of its small files is read at first use, once, and kept."""

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
from spd.formats.hub import resolve_model
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


@dataclass(frozen=True)
class ModelFolder(os.PathLike[str]):
    """What a folder holds, by the file that says it. Equal by path; copied and pickled as its path alone.

    Where the path leads to a GGUF file, that one file says everything.
    """

    path: Path

    @classmethod
    def from_path(cls, folder: Path | ModelFolder) -> ModelFolder:
        return folder if isinstance(folder, ModelFolder) else cls(folder)

    @classmethod
    def resolve(cls, reference: str) -> ModelFolder:
        """What a person's words mean; see `resolve_model`."""
        return cls(resolve_model(reference))

    @cached_property
    def gguf(self) -> GgufModel | None:
        """The model of a GGUF file; None for a folder. Raises CheckpointError."""
        return GgufModel.open(self.path) if is_gguf(self.path) else None

    @cached_property
    def fields(self) -> Fields:
        """`config.json` as it stands there, or what a GGUF file says. Raises NotFoundError without any."""
        if self.gguf is not None:
            return self.gguf.fields
        if CONFIG_FILE not in list_folder(self.path):
            why = f"{self.path}: is no model folder: there is no {CONFIG_FILE}"
            raise NotFoundError(why, fix=["-m the folder that holds config.json and safetensors"])
        return Fields.read(self.path / CONFIG_FILE)

    @cached_property
    def _stated(self) -> ModelConfig:
        """What `config.json` says, whatever the weights hold."""
        fields = self.fields if self.gguf is not None else with_quantization(self.fields, self.path)
        return model_config.model_config_of(fields)

    @cached_property
    def config(self) -> ModelConfig:
        """What the model, or the EAGLE-3 head, is. A head that is stored counts more than a flag."""
        stated = self._stated
        if stated.head_kind is not None:
            return stated
        try:
            tied = self._is_tied(stated.tie_embeddings)
        except (
            SpdError
        ):  # without weights that can be read, which others refuse where they need them
            return stated
        return stated if tied == stated.tie_embeddings else replace(stated, tie_embeddings=tied)

    def _is_tied(self, stated: bool) -> bool:
        """True if the embedding is the output head too, by the configuration and the weights.

        As in transformers, a stored head is used where it differs from the embedding.
        """
        tensors = self.checkpoint.tensors
        if HEAD not in tensors:
            return stated or self.fields.get("tie_word_embeddings") is True  # of a wrapper
        if not stated or EMBEDDING not in tensors:
            return stated
        with self.checkpoint as opened:
            is_copy = opened.tensors_equal(HEAD, opened, EMBEDDING)
        if not is_copy:
            words = "%s: tie_word_embeddings is true, but %s is stored and differs: it is the head"
            logger.warning(words, self.path / CONFIG_FILE, HEAD)
        return is_copy

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights' checked headers. Closing it closes files only: tensors can be read again.

        MTP layers in a file that the index does not name are among them.
        """
        if self.gguf is not None:
            return self.gguf.checkpoint
        try:
            layers = self._stated.num_layers
        except SpdError:
            return Checkpoint.open(self.path)
        return Checkpoint.open(self.path, is_extra=partial(is_mtp_tensor, num_layers=layers))

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the folder has no tokenizer.json."""
        if self.gguf is not None:
            return self.gguf.tokenizer
        from spd.formats.tokenizer import Tokenizer

        known = (self.path / TOKENIZER_FILE).exists()
        return Tokenizer.open(self.path, self.tokenizer_config) if known else None

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
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
        if self.gguf is not None:
            return self.gguf.generation
        return model_config.read_generation_config(self.path, vocab_size=self.config.vocab_size)

    def require_folder(self, command: str) -> None:
        """Raise UsageError for a GGUF file: the command reads safetensors."""
        if self.gguf is not None:
            why = f"{self.path}: is a GGUF file, {command} reads a folder with safetensors"
            raise UsageError(why, fix=["the model as it was published, before it was converted"])

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __reduce__(self) -> tuple[type[ModelFolder], tuple[Path]]:
        return ModelFolder, (self.path,)

"""A model folder: each of its small files is read at first use, once, and kept."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from spd.formats import model_config
from spd.formats.checkpoint import Checkpoint
from spd.formats.hub import resolve_model
from spd.formats.json_file import Fields
from spd.formats.model_config import FILE_NAME, GenerationConfig, ModelConfig
from spd.formats.mtp import MtpSource, check_fits, find_mtp, read_head_folder
from spd.formats.quantized import with_quantization

if TYPE_CHECKING:
    from spd.formats.chat_template import ChatTemplate
    from spd.formats.tokenizer import Tokenizer, TokenizerConfig


@dataclass(frozen=True)
class ModelFolder(os.PathLike[str]):
    """What a folder holds, by the file that says it. Equal by path; copied and pickled as its path alone."""

    path: Path

    @classmethod
    def of(cls, folder: Path | ModelFolder) -> ModelFolder:
        return folder if isinstance(folder, ModelFolder) else cls(folder)

    @classmethod
    def named(cls, reference: str) -> ModelFolder:
        """What a person's words mean; see `resolve_model`."""
        return cls(resolve_model(reference))

    @cached_property
    def fields(self) -> Fields:
        """`config.json` as it stands there."""
        return Fields.of(self.path / FILE_NAME)

    @cached_property
    def config(self) -> ModelConfig:
        """What the model, or the EAGLE-3 head, is."""
        return model_config.model_config_of(with_quantization(self.fields, self.path))

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The weights' checked headers. Closing it closes files only: tensors can be read again."""
        return Checkpoint.open(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None where the folder has no tokenizer.json."""
        from spd.formats.tokenizer import Tokenizer

        known = (self.path / "tokenizer.json").exists()
        return Tokenizer.open(self.path, self.tokenizer_config) if known else None

    @cached_property
    def tokenizer_config(self) -> TokenizerConfig:
        from spd.formats.tokenizer import read_tokenizer_config

        return read_tokenizer_config(self.path)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None where the folder has none."""
        from spd.formats.chat_template import ChatTemplate

        return ChatTemplate.open(self.path, self.tokenizer_config)

    @cached_property
    def generation(self) -> GenerationConfig:
        return model_config.read_generation_config(self.path, vocab_size=self.config.vocab_size)

    @cached_property
    def head(self) -> MtpSource:
        return read_head_folder(self)

    def mtp_source(self, head: ModelFolder | None = None) -> MtpSource | None:
        """The MTP head to use with this target: of a head folder made for it, else its own; None without."""
        if head is not None:
            check_fits(head.head, self.config, self.path)
            return head.head
        layout = find_mtp(self.config.architecture, self.checkpoint.tensors, self.config.num_layers)
        return None if layout is None else MtpSource(self, layout, self.config)

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    def __reduce__(self) -> tuple[type[ModelFolder], tuple[Path]]:
        return ModelFolder, (self.path,)

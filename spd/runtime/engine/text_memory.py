"""The texts of ended requests, which lookup drafts from later, and those of earlier sessions.

So a turn that a client has cut out of its chat, a file or a tool's result is drafted from once
more. No torch here.
"""

from __future__ import annotations

import logging

from spd.errors import IncompatibleError, SpdError
from spd.formats.private_texts import PrivateTexts
from spd.runtime.engine.sequence import Sequence
from spd.runtime.plan.plan import EnginePlan
from spd.runtime.round.round_queue import RoundQueue

logger = logging.getLogger(__name__)


class TextMemory:
    """Hands the token ids of texts to prompt lookup, and to a file where the config names a folder.

    When it is made it reads the texts of earlier sessions from that file. Raises UsageError and
    ResourceError for a folder that is not private.
    """

    def __init__(self, plan: EnginePlan, queue: RoundQueue) -> None:
        self._queue = queue
        self._limit = plan.pool_tokens
        self._overlap = plan.config.ngram_max
        self._file: PrivateTexts | None = None
        folder = plan.config.lookup
        if folder is not None and self._limit:
            tokenizer = plan.model.tokenizer
            if tokenizer is None:
                raise IncompatibleError("--lookup needs a tokenizer, and the model has none")
            self._file = PrivateTexts(folder, tokenizer.fingerprint, self._limit)
            for text in self._file.read_texts():
                queue.remember_text(text)

    def add_sequence(self, sequence: Sequence) -> None:
        """Add the text of a sequence that ends, less its cached prefix, to lookup's pool and the
        file.

        A file that cannot be written is given up with a warning.
        """
        if not self._limit:
            return
        start = max(0, sequence.metrics.cached_tokens - self._overlap)
        text = sequence.tokens()[start:][-self._limit :]
        self._queue.remember_text(text)
        if self._file is not None:
            try:
                self._file.append_text(text)
            except SpdError as error:  # A full disk, say: the reply goes on.
                logger.warning("--lookup keeps no more texts: %s", error)
                self._file = None

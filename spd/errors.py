"""The errors `spd` raises on purpose: what is wrong, why, and what to type instead.

Owns the exit codes. Imports nothing, so that every room may raise these.
"""

from __future__ import annotations

from collections.abc import Sequence


class SpdError(Exception):
    """A refusal in words: one line of message, indented reasons, and fixes that can be pasted."""

    exit_code, default_code = 1, "internal"

    def __init__(
        self,
        message: str,
        *,
        reason: Sequence[str] = (),
        fix: Sequence[str] = (),
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = tuple(reason)
        self.fix = tuple(fix)
        self.code = code or self.default_code


class UsageError(SpdError):
    """The words typed are off: a bad value, a missing input, a refused overwrite."""

    exit_code, default_code = 2, "usage"


class NotFoundError(SpdError):
    """A model or file is not there, or not available offline."""

    exit_code, default_code = 3, "not_found"


class IncompatibleError(SpdError):
    """What was asked cannot be honoured: vocabulary, architecture, feature combination, context."""

    exit_code, default_code = 4, "incompatible"


class CheckpointError(IncompatibleError):
    """A checkpoint that cannot be read, naming the file and the field."""

    default_code = "checkpoint"


class ResourceError(SpdError):
    """Memory or disk does not suffice."""

    exit_code, default_code = 5, "resources"


class CheckFailedError(SpdError):
    """A check that was asked for did not hold."""

    exit_code, default_code = 6, "check_failed"


class PartialError(SpdError):
    """Some of many were done, and some failed."""

    exit_code, default_code = 7, "partial"


class NetworkError(SpdError):
    """The network, an authentication or a gated repository stood in the way."""

    exit_code, default_code = 8, "network"


class EngineError(SpdError):
    """A worker or the engine failed while running."""

    exit_code, default_code = 9, "engine"


class IncompleteError(SpdError):
    """A reply ended before the schema or grammar that it has to follow was complete."""

    exit_code, default_code = 10, "incomplete"

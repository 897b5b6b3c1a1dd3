"""The errors that `spd` raises on purpose, each with reasons and fixes, and their exit codes.

Imports nothing, so that every package may raise these.
"""

from __future__ import annotations

from collections.abc import Sequence


class SpdError(Exception):
    """An error for people: a message of one line, indented reasons, and fixes to paste."""

    exit_code = 1
    """The exit status of the command line."""
    default_code = "internal"
    """The code of errors of the class that are given none."""

    def __init__(
        self,
        message: str,
        *,
        reason: Sequence[str] = (),
        fix: Sequence[str] = (),
        code: str | None = None,
    ) -> None:
        """Set the parts. fix: commands or arguments that help. code: for programs, one word."""
        super().__init__(message)
        self.message = message
        self.reason = tuple(reason)
        self.fix = tuple(fix)
        self.code = code or self.default_code


class UsageError(SpdError):
    """The command line or a parameter is wrong: a value, a missing input, a refused overwrite."""

    exit_code = 2
    default_code = "usage"


class NotFoundError(SpdError):
    """A model or file is not there, or not available offline."""

    exit_code = 3
    default_code = "not_found"


class IncompatibleError(SpdError):
    """The request cannot be met: vocabulary, architecture, feature combination, context."""

    exit_code = 4
    default_code = "incompatible"


class CheckpointError(IncompatibleError):
    """A checkpoint cannot be read; the message names the file and the field."""

    default_code = "checkpoint"


class ResourceError(SpdError):
    """The machine lacks something: memory, disk space, a device, a library, a private folder."""

    exit_code = 5
    default_code = "resources"


class CheckFailedError(SpdError):
    """A requested check failed."""

    exit_code = 6
    default_code = "check_failed"


class PartialError(SpdError):
    """Some of several requests succeeded, and some failed."""

    exit_code = 7
    default_code = "partial"


class NetworkError(SpdError):
    """The network, an authentication or a gated repository prevented a download."""

    exit_code = 8
    default_code = "network"


class EngineError(SpdError):
    """A worker or the engine failed while running."""

    exit_code = 9
    default_code = "engine"


class IncompleteError(SpdError):
    """A reply ended before it was complete by the schema or grammar that constrains it."""

    exit_code = 10
    default_code = "incomplete"

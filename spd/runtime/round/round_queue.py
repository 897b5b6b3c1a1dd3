"""The engine's interface to the device: slots, prompts and rounds, enqueued in order and read
later.

`LocalRoundQueue` runs on this process's device; `LeadingQueue` sends each call to the other ranks
first. Arguments are plain values that do not depend on the rank, since all ranks make the same
calls in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from spd.runtime.round.graphs import CapturedRounds, RoundShape
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.prompt_scores import PromptScores
from spd.runtime.round.rows import SlotView
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps


class HostLogprobs(NamedTuple):
    """Log-probabilities on the host: of the samples [S][R].

    The likeliest values and ids [S][R][N].
    """

    sampled: list[list[float]]
    values: list[list[list[float]]]
    ids: list[list[list[int]]]


class RoundResult(NamedTuple):
    """The emission of one round, on the host."""

    rows: list[list[int]]
    """The ring's row of each slot; see `read_emission`."""
    logprobs: HostLogprobs | None
    k: int
    draft_forwards: int
    next_drafts: list[list[int]] | None
    """The drafts of each slot for the next round, where a slot has a grammar."""
    seconds: tuple[float, float, float]
    """Times of drafting, verification and the remaining work, by the device's clock.

    On a GPU sampling counts as verification.
    """
    gap: float
    """Seconds from the end of the round before to its beginning, by the same clock.

    0 for the first.
    """


class PendingRound(Protocol):
    """A round enqueued and not yet read."""

    def read(self) -> RoundResult:
        """Wait until the round has run, and return its emission. Rounds are read in order."""
        ...


@dataclass(frozen=True)
class SlotAdmission:
    """A sequence that takes a slot: its tokens, its limits, and its cached positions."""

    slot: int
    tokens: list[int]
    """The prompt, then the tokens that were committed before a preemption."""
    prompt_length: int
    params: SamplingParams
    draft_max: int | None
    length_limit: int
    stop_ids: tuple[int, ...]
    prefilled: int
    """Positions whose cache is on the pages, or comes from the snapshot."""
    pages: list[int]
    snapshot: int | None
    """The place of the recurrent states as of `prefilled`, where the model has some."""


class RoundQueue(Protocol):
    """Writes slots and prompts, and runs rounds in order, with a ticket for each."""

    @property
    def runner(self) -> ModelRunner:
        """Return the target's runner."""
        ...

    @property
    def sampler(self) -> Sampler: ...

    @property
    def captured(self) -> CapturedRounds | None:
        """Return the captured or recorded rounds; None where every round is eager."""
        ...

    @property
    def is_writing(self) -> bool:
        """True while parts of prompts, or snapshots after them, wait to be written."""
        ...

    def admit(self, admission: SlotAdmission) -> None:
        """Write a slot's row; it stays inactive."""
        ...

    def upload_pages(self, slot: int, pages: list[int]) -> None:
        """Upload a slot's page numbers."""
        ...

    def set_masks(self, slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        """Set masks int32 [R, words] of a slot's next round, and its drafts, of which `legal` are allowed."""
        ...

    def resume(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        """Let a slot continue that a stop id has stopped; from now on it stops at these ids."""
        ...

    def set_active(self, slot: int, active: bool) -> None:
        """Let a slot take part in rounds from the next one on, or keep it out of them."""
        ...

    def retire(self, slot: int, pages: list[int], end: int, place: int | None) -> None:
        """Write what a slot's pages lack up to `end`, the drafter's too, and deactivate it.

        Its request has ended, or will be admitted again. place: where a snapshot of its recurrent
        states is saved; None: only the drafter's states at the end of a partly filled page are.
        """
        ...

    def zero_pages(self, pages: list[int]) -> None:
        """Zero pages that may hold values that are not finite."""
        ...

    def remember(self, ids: list[int]) -> None:
        """Add a text to those that lookup drafts from, where it keeps any."""
        ...

    def write(
        self,
        slot: int,
        pages: list[int],
        start: int,
        end: int,
        chunked: bool,
        num_likeliest: int | None = None,
    ) -> None:
        """Write the caches of positions `start` to `end` of the prompt admitted last, at `flush` at
        latest.

        num_likeliest: how many likeliest tokens to score at each position, besides the prompt's token;
        None: no scores.
        """
        ...

    def save(self, place: int, slot: int, pages: list[int], end: int) -> None:
        """Save a slot's states as of position `end` to a snapshot's place, at `flush` at the latest."""
        ...

    def flush(self) -> None:
        """Enqueue all parts of prompts and snapshots that wait to be written."""
        ...

    def prompt_scores(self, slot: int) -> PromptScores:
        """Wait for the scores of a slot's prompt; return and drop them."""
        ...

    def launch(
        self,
        k: int,
        views: Sequence[SlotView],
        needs: SamplingSteps,
        num_logprobs: int | None,
        next_k: int,
        chained: int = 0,
    ) -> PendingRound:
        """Enqueue one round; see `Round.run`."""
        ...

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs.

        False if memory ran out, and all captures were dropped.
        """
        ...

    def restart(self) -> None:
        """Drop what was enqueued, after a round that failed."""
        ...

    def close(self) -> None:
        """Release what this process does not own."""
        ...

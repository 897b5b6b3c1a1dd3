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
    """Log-probabilities of a round's rows, on the host, for S slots of R rows."""

    sampled: list[list[float]]
    """Those of the sampled tokens [S][R]."""
    values: list[list[list[float]]]
    """Those of the N likeliest tokens [S][R][N]."""
    ids: list[list[list[int]]]
    """The ids of the N likeliest tokens [S][R][N]."""


class RoundResult(NamedTuple):
    """The emission of one round, on the host."""

    rows: list[list[int]]
    """The ring's row of each slot; see `read_emission`."""
    logprobs: HostLogprobs | None
    k: int
    """Drafts of a slot that the round verified at most."""
    draft_forwards: int
    """Forward passes of the drafting loop."""
    next_drafts: list[list[int]] | None
    """The drafts of each slot for the next round, where a slot has a grammar."""
    seconds: tuple[float, float, float]
    """Seconds of drafting, of verification and of the remaining work, by the device's clock.

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
    """Drafts of a round that are verified at most; None: all."""
    length_limit: int
    """The length in tokens, prompt included, at which the slot stops."""
    stop_ids: tuple[int, ...]
    """Token ids after which the slot stops."""
    prefilled: int
    """Positions whose cache is on the pages, or comes from the snapshot."""
    pages: list[int]
    snapshot: int | None
    """The snapshot's place with the recurrent states as of `prefilled`, where the model has some.
    """


class RoundQueue(Protocol):
    """Writes slots and prompts, and runs rounds in order; returns a `PendingRound` for each."""

    @property
    def runner(self) -> ModelRunner:
        """Return the target's runner."""
        ...

    @property
    def sampler(self) -> Sampler:
        """Return the sampler with the slots' sampling parameters."""
        ...

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
        """Write a slot's page numbers into its row of the device's page table."""
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
        """Zero pages, which may hold values that are not finite, of the target's and drafters'
        caches.
        """
        ...

    def remember_text(self, ids: list[int]) -> None:
        """Add a text's token ids to the pool that prompt lookup drafts from, where there is one."""
        ...

    def queue_prompt_part(
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

        slot, pages: where that prompt was admitted. chunked: True for the program of full chunks,
        False for that of few rows. num_likeliest: how many likeliest tokens to score at each
        position, besides the prompt's token; None: no scores.
        """
        ...

    def queue_snapshot(self, place: int, slot: int, pages: list[int], end: int) -> None:
        """Queue a snapshot of a slot's states as of position `end`, which `flush` saves to
        `place`.
        """
        ...

    def flush(self) -> None:
        """Write all queued parts of prompts, in all caches, then save all queued snapshots.

        On a GPU this only enqueues the passes and copies.
        """
        ...

    def take_prompt_scores(self, slot: int) -> PromptScores:
        """Write what is queued, wait for the scores of a slot's prompt, and return and drop
        them.
        """
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
        """Enqueue one round with the arguments of `Round.run`, after all that is still queued."""
        ...

    def capture(self, shape: RoundShape) -> bool:
        """Capture a round while nothing runs; return False if memory ran out, and all captures were
        dropped.
        """
        ...

    def drop_enqueued(self) -> None:
        """Drop queued parts and snapshots, after a round that failed."""
        ...

    def close(self) -> None:
        """End the other ranks, where there are some."""
        ...

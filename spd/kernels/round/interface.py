"""The contracts of a round's operations; `spd.kernels.interface` has all others, and the letters of
shapes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from spd.kernels.round.pool_lookup import TextPool
from spd.kernels.round.window import Paging, RoundTensors, RoundWindow, Rows


class RoundOperations(Protocol):
    """The operations that make a round of its state; what they write is written in place."""

    def round_window(
        self, state: RoundTensors, k: int, paging: Paging, usable_vocab: int
    ) -> RoundWindow:
        """Return every slot's verification window: the token at length - 1, then k drafts.

        Drafts end at the first id outside [0, usable_vocab), where the next token would pass
        length_limit, and after draft_cap of them. The start time of the round is written to
        `times`, in place.
        """
        ...

    def committed_window(
        self,
        state: RoundTensors,
        width: int,
        chosen: Tensor,
        paging: Paging,
        first: Tensor | None,
        ahead: int = 0,
    ) -> Rows:
        """Return the last `width` committed tokens of every slot, then `ahead` drafts.

        Rows before the text, before the positions first int64 [S], from draft_limit on, or of slots
        that chosen bool [S] leaves out are not valid. Positions are cut to [0, limit).
        """
        ...

    def draft_step(
        self, state: RoundTensors, sampled: Tensor, step: int, k: int, paging: Paging
    ) -> Rows:
        """Write one drafted token into draft[:, step] and return the row that draws the next one.

        sampled int64 [S, 1] is the row's token, at position length + step; the result may share its
        memory. After the last of k steps num_drafts [S] is written, in place: the number of drafts
        whose predecessor lies below draft_limit, 0 in inactive slots.
        """
        ...

    def mark_time(self, times: Tensor, counter: Tensor, column: int, advance: bool) -> None:
        """Write the time in nanoseconds to times[counter % depth, column], in place.

        times int64 [depth, NUM_TIMES] contiguous; counter int64 [1] is incremented if advance. On a
        GPU only the Triton form writes the device's time.
        """
        ...

    def round_commit(
        self,
        state: RoundTensors,
        window: RoundWindow,
        sampled: Tensor,
        finite: Tensor,
        accepted: Tensor | None = None,
        generated: Tensor | None = None,
    ) -> None:
        """Append accepted + 1 samples, fewer at a stop id or a non-finite row, and emit them.

        sampled int64 and finite bool [S, k + 1]. Written in place: tokens from column length on,
        length, active, generated int32 [S, V] (one more for each committed token), the commit's
        time, and the ring's row counter % depth, at least emission_width(k) wide; see
        `read_emission`. accepted int64 [S], 0 to k, comes from `verify_drafts`; without it leading
        drafts that equal samples are accepted.
        """
        ...

    def ngram_lookup(
        self,
        state: RoundTensors,
        k: int,
        ngram_min: int,
        ngram_max: int,
        bound: int,
        keep_drafts: bool = False,
        behind: int = 0,
    ) -> None:
        """Draft k >= 0 tokens that followed the longest earlier match of the suffix, the latest of
        equals.

        Where fewer than k tokens followed it, they are repeated periodically. Matches are ngram_min
        >= 1 to ngram_max tokens long. Written in place: draft[:, :k]; num_drafts, k or 0; match,
        the match's length. Inactive slots get 0 drafts and keep their match. bound >= every active
        slot's length; only the torch form reads it. keep_drafts: `draft` already holds drafts,
        which stay in inactive slots and where nothing matches. behind > 0: active slots whose match
        is 0 and that have so many drafts continue them: the suffix is that of the text and these
        drafts, which are copied to tokens from column length on; draft[behind:k] are written where
        it matches, num_drafts k and match -behind. All others stay as they are. Source: Saxena 2023
        (prompt lookup decoding).
        """
        ...

    def pool_lookup(
        self,
        state: RoundTensors,
        pool: TextPool,
        k: int,
        ngram_min: int,
        ngram_max: int,
        behind: int = 0,
    ) -> None:
        """Draft at most k tokens that followed a longer match of the suffix in a pool, after `ngram_lookup`.

        Of the entries in the bucket of the suffix's last ngram_min tokens the longest match is
        taken, at most ngram_max tokens long, the first of equals. Written in place where it is
        longer than match, in active slots: draft up to the end of the pool's text; num_drafts,
        their number; match, its length. With behind > 0 as in `ngram_lookup`, of which the same
        slots continue their drafts, as long as it has found nothing there. The cost does not
        depend on the pool's size.
        """
        ...

"""An explanation in words: what a round's time goes into, whether speculation pays, what to try next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spd.runtime.plan.memory import show_size
from spd.runtime.round.cpu_load import SLIGHT

if TYPE_CHECKING:
    from spd.runtime.lab.explain import Explanation, Prospect

NOTICEABLE = 0.02
"""A prospect is worth a try when it is faster by more than this."""
LARGE_HOST = 0.15
"""The host's share of a round from which it is what to look at first."""


def advice(explanation: Explanation) -> tuple[str, str]:
    """(what limits it, what to type next)."""
    return bottleneck(explanation), next_step(explanation)


def bottleneck(e: Explanation) -> str:
    """What makes speculation slower than it should be, or what a round's time goes into."""
    if not e.k:
        return "nothing was drafted"
    costs, k = e.costs, e.k
    if e.now.speed_up < 1:
        plain, length = e.plain.round_ms, e.now.length
        if costs.host > LARGE_HOST * e.now.round_ms and length * plain > e.now.round_ms - costs.host:
            return "the host: without its gaps between rounds it would pay"
        if length - 1 < 0.1:
            return "acceptance: hardly a draft is right"
        if length * plain > e.now.round_ms - costs.draft_ms(k):
            return "drafting: with a free drafter it would pay"
        if length * plain > e.now.round_ms - (costs.verify_ms(k + 1) - costs.verify_ms(1)):
            return "verification: its extra rows cost more than they bring"
        return "acceptance: even a free drafter with these drafts would not pay"
    parts = {
        "drafting": costs.draft_ms(k),
        "the extra rows of verification": costs.verify_ms(k + 1) - costs.verify_ms(1),
        "the host": costs.host,
        "sampling and bookkeeping": costs.rest,
    }
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] < 0.1 * e.now.round_ms:
        return "acceptance: the rounds are as cheap as plain ones"
    return worst


def next_step(e: Explanation) -> str:
    """The option that promises most, by the trace."""
    best = e.best
    gain = best.tokens_per_second / max(e.now.tokens_per_second, 1e-9) - 1
    if best.k == 0:
        return "--spec off" if e.k else "--spec auto, or a draft model: --draft-model FOLDER"
    if gain > NOTICEABLE and "+" not in best.method:  # beside lookup k is a model's alone, and not asked for
        return f"--spec {best.method} --draft-max {best.k}"
    if e.costs.host > LARGE_HOST * e.now.round_ms:
        return "--graphs on, --lag 1: the device waits for the host"
    if e.bounded is not None and e.bounded.tokens_per_second > (1 + NOTICEABLE) * e.now.tokens_per_second:
        return "--verify rejection, if the same text with and without speculation is not needed"
    if e.method == "draft" and e.costs.draft_ms(e.k) > 0.3 * e.now.round_ms:
        return "a smaller draft model"
    if (best.method, best.k) != (e.now.method, e.now.k):
        return f"nothing: that is {gain:.1%} faster at most"
    return "nothing: this is the best that the trace knows of"


def paragraph(e: Explanation) -> str:
    """What a person wants to know, in a few sentences."""
    if not e.k:
        return (
            f"Nothing was drafted in {e.rounds} rounds of {e.plain.round_ms:.2f} ms. {_lookup_words(e)}"
            f"Next: {next_step(e)}."
        )
    costs, now = e.costs, e.now
    parts = {
        "verifying": costs.verify_ms(e.k + 1),
        "drafting": costs.draft_ms(e.k),
        "the rest": costs.rest,
        "waiting for the host": costs.host,
    }
    shares = ", ".join(f"{ms / now.round_ms:.0%} {name}" for name, ms in parts.items() if ms > 0)
    plain = "" if costs.plain_measured else " (plain rounds were not in the trace: carried over from others)"
    judged = f"{now.speed_up:.2f} × plain decoding{plain}"
    needed = e.break_even(e.k)
    sentences = [
        f"Other programs kept {e.other_load:.1f} CPUs busy: a quiet machine is faster."
        if e.other_load > SLIGHT
        else "",
        "Acceptance was imposed: this is what such drafts would give." if e.imposed else "",
        f"With {e.method} at k = {e.k} a round takes {now.round_ms:.2f} ms ({shares}) and brings "
        f"{now.length:.2f} tokens.",
        f"It pays from {needed:.2f} tokens on, so this is {judged}.",
        f"Recurrent states, {show_size(e.state_bytes)}, are read and written once a round whatever k is."
        if e.state_bytes
        else "",
        f"What limits it is {bottleneck(e)}.",
    ]
    best = e.best
    if best.k and (best.method, best.k) != (now.method, now.k):
        sentences.append(
            f"The best by this trace is {best.method} at k = {best.k}: {best.tokens_per_second:.1f} "
            f"tokens/s, {best.speed_up:.2f} × plain."
        )
    elif not best.k:
        sentences.append(f"Plain decoding, {best.tokens_per_second:.1f} tokens/s, is the best here.")
    sentences.append(_lookup_words(e).strip())
    if e.bounded is not None:
        sentences.append(
            f"--verify rejection would give {now.speed_up:.2f} to {e.bounded.speed_up:.2f} × plain."
        )
    sentences.append(f"Next: {next_step(e)}.")
    return " ".join(sentence for sentence in sentences if sentence)


def _lookup_words(e: Explanation) -> str:
    best: Prospect | None = max(e.ngram, key=lambda prospect: prospect.tokens_per_second, default=None)
    if best is None or e.method == "ngram":
        return ""
    least = "" if e.prompt_known else "at least "
    return f"N-gram lookup on this text would give {least}{best.speed_up:.2f} × plain (k = {best.k}). "

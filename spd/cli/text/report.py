"""What is said about a reply: the JSON object, the statistics line, the plan of a verbose run.

The names in the JSON object are the ones other tools already read; its schema is versioned.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spd.cli.text.structured import parted

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime import Engine, Request, RequestMetrics
    from spd.runtime.engine.request import Gathered, TokenLogprob


def reply_fields(
    reply: Gathered, metrics: RequestMetrics, engine: Engine, request: Request, inside: bool | None
) -> dict[str, Any]:
    """What JSON says of a reply, alone or one of many; `inside` as in `ThinkingSplitter`."""
    reasoning, text = parted(reply.text, inside)
    plan, params = engine.plan, request.params
    shown: dict[str, Any] = {
        "text": text,
        "reasoning": reasoning,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
        "usage": metrics.usage(),
        "timings": metrics.timings(),
        "metrics": {
            "speculative_decoding": metrics.speculative_decoding(
                plan.spec, plan.shape.draft_max, imposed=plan.wishes.synthetic_acceptance is not None
            )
        },
        "seed": params.seed,
    }
    if params.logprobs is not None:
        shown["logprobs"] = [logprob_entry(entry, engine.tokenizer) for entry in reply.logprobs]
    return shown


def early_end(fields: Mapping[str, Any], lacks: str | None, request: Request) -> str | None:
    """What a reply lacks because it ended early, and why it did; None where it lacks nothing."""
    if lacks is None and fields["reasoning"] is not None and not fields["text"]:
        lacks = "the reply ended while thinking, without an answer"
    finish, most = fields["finish_reason"], request.params.max_tokens
    if lacks is None or finish not in ("stop", "length"):
        return None
    full = most is not None and len(fields["token_ids"]) >= most
    why = f"-n {most:,} was reached" if full else "the context is full"
    return f"{lacks}: {why if finish == 'length' else 'a stop text or token came'}"


def versions() -> dict[str, str]:
    """Versions of what takes part, here or in a server."""
    from spd import __version__

    found = {"spd": __version__, "python": platform.python_version()}
    for name in ("torch", "tokenizers", "triton"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def logprob_entry(entry: TokenLogprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """A token's log-probability, and those of the likeliest, with their text and bytes."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        data = b"" if tokenizer is None else tokenizer.token_bytes(token_id)
        return {
            "token_id": token_id,
            "token": data.decode("utf-8", "replace"),
            "bytes": list(data),
            "logprob": logprob,
        }

    return {**named(entry.token_id, entry.logprob), "top": [named(*likely) for likely in entry.top]}


def stats_line(metrics: RequestMetrics) -> str:
    """`318 tok · 64.8 tok/s · load 3.2 s · first 0.21 s · 3.05 tok/round · drafts 213/416 (51%)`.

    The first token takes `first` when the model is loaded, and `load` more when it is not. A chat shows the
    same and how much of the context is used.
    """
    facts = (
        (metrics.decode_tokens_per_second, "{:.1f} tok/s"),
        (metrics.load_ms / 1000, "load {:.2f} s"),
        (metrics.queue_ms / 1000 if metrics.queue_ms >= 100.0 else 0, "queued {:.2f} s"),  # on a server
        (metrics.first_token_ms / 1000, "first {:.2f} s"),
        (metrics.rounds and metrics.tokens_per_round, "{:.2f} tok/round"),
    )
    parts = [f"{metrics.completion_tokens} tok", *(form.format(fact) for fact, form in facts if fact)]
    if metrics.draft_n:
        share = f"{metrics.draft_acceptance_rate:.0%}"
        parts.append(f"drafts {metrics.draft_n_accepted}/{metrics.draft_n} ({share})")
    return " · ".join(parts)

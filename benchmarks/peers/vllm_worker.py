"""The vLLM worker for CPU: one engine, plain, with a draft model or by n-gram lookup, stepped by hand.

The environment (`VLLM_CPU_KVCACHE_SPACE`, `VLLM_CPU_OMP_THREADS_BIND`) is set by `entries.py`,
before vLLM is imported. Prefix caching is off, or a repeated prompt would be no prefill at all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm  # type: ignore[import-not-found,unused-ignore]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.protocol import (
    NGRAM_MAX,
    NGRAM_MIN,
    Speculation,
    WorkerOptions,
    imposed_rates,
    serve,
)
from benchmarks.peers.stepped import SteppedEngine
from benchmarks.peers.untied import is_latent, read_config, untie
from spd.runtime.engine.request import Event, Request
from spd.runtime.engine.trace import RoundRecord
from spd.runtime.lab.load import Pass

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def speculative_config(options: WorkerOptions) -> dict[str, Any] | None:
    """Return vLLM's configuration of drafts; None for plain decoding."""
    k = options.draft_max
    if options.ngram:
        lengths = {"prompt_lookup_min": NGRAM_MIN, "prompt_lookup_max": NGRAM_MAX}
        return {"num_speculative_tokens": k, "method": "ngram", **lengths}
    if options.mtp:
        return {"num_speculative_tokens": k, "method": "mtp"}
    if options.eagle3 is not None:
        return {"model": str(options.eagle3), "num_speculative_tokens": k, "method": "eagle3"}
    if options.draft is None:
        return None
    config = {"model": str(options.draft), "num_speculative_tokens": k, "method": "draft_model"}
    if options.imposed is not None:
        rates = imposed_rates(options.imposed, k)
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return config


class Stepper:
    """vLLM's engine as a load drives it."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.trace: Callable[[RoundRecord], None] | None = None

    def add(self, request: Request) -> None:
        """Queue a request."""
        params = vllm.SamplingParams(
            temperature=request.params.temperature,
            max_tokens=request.params.max_tokens,
            ignore_eos=request.params.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(request.id, {"prompt_token_ids": list(request.prompt_ids)}, params)

    def step(self) -> list[Event]:
        """Run one step of the engine."""
        events = []
        for output in self.engine.step():
            completion = output.outputs[0]
            reason = (completion.finish_reason or "stop") if output.finished else None
            events.append(Event(output.request_id, tuple(completion.token_ids), "", reason))
        return events

    @property
    def has_work(self) -> bool:
        """True if anything waits or runs."""
        return bool(self.engine.has_unfinished_requests())


class VllmEngine(SteppedEngine):
    """A loaded `LLM` whose engine is stepped by hand."""

    def __init__(self, options: WorkerOptions) -> None:
        speculation = speculative_config(options)
        self.speculates = speculation is not None
        model = options.model
        if is_latent(model) and read_config(model).get("tie_word_embeddings"):
            self.copy = tempfile.TemporaryDirectory()
            model = untie(model, Path(self.copy.name))
        self.llm = vllm.LLM(
            model=str(model),
            dtype=options.dtype,
            max_model_len=options.ctx,
            max_num_seqs=options.slots,
            enable_prefix_caching=False,
            disable_log_stats=not self.speculates,
            seed=0,
            **({"speculative_config": speculation} if speculation else {}),
        )
        self.counted = Speculation()

    def versions(self) -> Mapping[str, str]:
        """Return vLLM's and torch's versions."""
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def decoder(self, concurrency: int) -> Stepper:
        """Return the one engine."""
        return Stepper(self.llm.llm_engine)

    def speculation(self, ran: Pass) -> Speculation | None:
        """Return the increments of vLLM's counters."""
        if not self.speculates:
            return None
        values: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            if metric.name in COUNTERS:
                values[COUNTERS[metric.name]] = int(metric.value)
            elif metric.name == PER_POSITION:
                values["per_position"] = tuple(int(value) for value in metric.values)
        before = self.counted
        self.counted = Speculation(**values)
        return self.counted.since(before)


if __name__ == "__main__":
    raise SystemExit(serve(VllmEngine))

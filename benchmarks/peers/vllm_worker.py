"""The vLLM worker for CPU: one engine, plain, with a draft model or by n-gram lookup, stepped by hand.

The environment (`VLLM_CPU_KVCACHE_SPACE`, `VLLM_CPU_OMP_THREADS_BIND`) is set by `peers_cpu.py`, before
vLLM is imported. Prefix caching is off, or a repeated prompt would be no prefill at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import vllm  # type: ignore[import-not-found,unused-ignore]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.protocol import (
    NGRAM_MAX,
    NGRAM_MIN,
    ChunkClock,
    Generation,
    WorkerOptions,
    serve,
)


class VllmEngine:
    """A loaded `LLM` whose engine is stepped by hand."""

    def __init__(self, options: WorkerOptions) -> None:
        speculation: dict[str, Any] = {}
        if options.draft is not None:
            speculation["speculative_config"] = {
                "model": str(options.draft),
                "num_speculative_tokens": options.draft_max,
                "method": "draft_model",
            }
        elif options.ngram:
            speculation["speculative_config"] = {
                "num_speculative_tokens": options.draft_max,
                "method": "ngram",
                "prompt_lookup_min": NGRAM_MIN,
                "prompt_lookup_max": NGRAM_MAX,
            }
        self.llm = vllm.LLM(
            model=str(options.model),
            dtype=options.dtype,
            max_model_len=options.ctx,
            max_num_seqs=1,
            enable_prefix_caching=False,
            seed=0,
            **speculation,
        )
        self.requests = 0

    def versions(self) -> Mapping[str, str]:
        """Return vLLM's and torch's versions."""
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate greedily, ignoring end tokens; each engine step that brings tokens is one chunk."""
        engine = self.llm.llm_engine
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.requests += 1
        clock = ChunkClock()
        engine.add_request(str(self.requests), {"prompt_token_ids": list(prompt_ids)}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                clock.add(list(output.outputs[0].token_ids))
        return clock.finish()


if __name__ == "__main__":
    raise SystemExit(serve(VllmEngine))

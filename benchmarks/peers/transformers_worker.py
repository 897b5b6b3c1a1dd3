"""The transformers worker: `generate`, plain, with an assistant at constant k, or by lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers  # type: ignore[import-not-found,unused-ignore]

from benchmarks.peers.protocol import NGRAM_MAX, ChunkClock, Generation, WorkerOptions, serve


class ClockStreamer:
    """A stand-in for a text streamer: the first call brings the prompt, the others new tokens."""

    def __init__(self, clock: ChunkClock) -> None:
        self.clock = clock
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take what `generate` streams."""
        if self.prompt_seen:
            self.clock.add(value.reshape(-1).tolist())
        self.prompt_seen = True

    def end(self) -> None:
        """Take the end of the stream."""


class TransformersEngine:
    """A loaded model and, where a draft was named, its assistant."""

    def __init__(self, options: WorkerOptions) -> None:
        torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model: Any = load(options.model, dtype=dtype)
        self.lookup = options.draft_max if options.ngram else None
        self.assistant: Any = None
        if options.draft is not None:
            self.assistant = load(options.draft, dtype=dtype)
            settings = self.assistant.generation_config
            settings.num_assistant_tokens = options.draft_max
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0

    def versions(self) -> Mapping[str, str]:
        """Return transformers' and torch's versions."""
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate greedily; end tokens are off, so exactly `tokens` come."""
        ids = torch.tensor([list(prompt_ids)])
        options: dict[str, Any] = (
            {"assistant_model": self.assistant} if self.assistant is not None else {}
        )
        if self.lookup is not None:
            options = {
                "prompt_lookup_num_tokens": self.lookup,
                "max_matching_ngram_size": NGRAM_MAX,
            }
        clock = ChunkClock()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                streamer=ClockStreamer(clock),
                **options,
            )
        return clock.finish()


if __name__ == "__main__":
    raise SystemExit(serve(TransformersEngine))

"""`transformers`' own assistant beside its target: no cache, every text computed anew, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.runtime.mtp_reference import HOW, chosen


class LibraryAssistant:
    """An assistant of `transformers` beside its target: no cache, every text computed anew, in float64."""

    def __init__(self, target: Path, folder: Path, bias: Mapping[int, float] | None = None) -> None:
        from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

        self.bias = bias or {}
        self.target = AutoModelForCausalLM.from_pretrained(target, **HOW).eval()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(folder, **HOW).eval()
        # A mask of the library's sees this distance and its own position: one more than the target's does.
        self.assistant.config.text_config.sliding_window -= 1

    def hidden(self, tokens: list[int]) -> Tensor:
        """Nothing: each draft computes its own text anew."""
        return torch.empty(0)

    @torch.inference_mode()
    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """The k greedy drafts after `tokens`, and how near the nearest second choice came."""
        wanted = {"output_hidden_states": True, "return_shared_kv_states": True}
        seen = self.target(torch.tensor([tokens[:-1]]), **wanted)
        state = seen.hidden_states[-1][:, -1:]
        last = tokens[-1]
        drafts = list[int]()
        gap = float("inf")
        position = torch.tensor([[len(tokens) - 1]])
        for _ in range(k):
            token = self.target.get_input_embeddings()(torch.tensor([[last]]))
            given = {
                "position_ids": position,
                "shared_kv_states": seen.shared_kv_states,
                "use_cache": False,
            }
            made = self.assistant(inputs_embeds=torch.cat((token, state), -1), **given)
            for token_id, bias in self.bias.items():
                made.logits[0, -1, token_id] += bias
            last, near = chosen(made.logits[0, -1])
            state = made.last_hidden_state
            drafts = [*drafts, last]
            gap = min(gap, near)
        return drafts, gap

"""The settings of a run, and the requests that prompts become with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from spd.conversation.prompt import Prompt, encode_prompt, leaves_thinking_open
from spd.conversation.sampling import ResolvedSampling
from spd.conversation.thinking import thinking_budget
from spd.conversation.thinking_grammar import grammar_after_thinking
from spd.conversation.token_ids import check_token_ids
from spd.conversation.vocabulary import Vocabulary
from spd.errors import IncompatibleError
from spd.runtime.engine.request import GrammarSpec, Request
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams

REQUEST_ID = "0"
"""The id of a request that runs alone."""


class PreparedRequest(NamedTuple):
    """A request for the engine, and True if its reply begins inside thinking."""

    request: Request
    inside_thinking: bool | None
    """None where the reply is no turn of a chat."""


@dataclass(frozen=True)
class Settings:
    """Everything about a run but its prompts.

    usable_vocab: token ids below it are in the tokenizer and the model. context: its length in
    tokens. think: the value of --think.
    """

    config: EngineConfig
    sampling: ResolvedSampling
    vocabulary: Vocabulary
    usable_vocab: int
    context: int
    grammar: GrammarSpec | None
    think: str

    def params_with(self, **values: Any) -> SamplingParams:
        """Return the run's sampling parameters with `values` in place of some.

        Raises UsageError for values that are not valid, and ids that are not in the vocabulary.
        """
        check_token_ids(values.get("stop_token_ids", ()), self.usable_vocab, "stop_token_ids")
        check_token_ids(
            [token for token, _ in values.get("logit_bias", ())], self.usable_vocab, "logit_bias"
        )
        return dataclasses.replace(self.sampling.params, **values)

    def prepare_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        grammar: GrammarSpec | None = None,
    ) -> PreparedRequest:
        """Return the request of a prompt, encoded.

        Without `params` the run's own parameters and grammar apply. Raises IncompatibleError
        without room for a reply, and what `encode_prompt` raises.
        """
        if params is None:
            params = self.sampling.params
            grammar = self.grammar
        ids = encode_prompt(prompt, self.vocabulary, self.context)
        if len(ids) >= self.context:
            max_context = self.vocabulary.config.max_positions
            reason = "A reply needs room too: at most one token less than the context."
            message = f"prompt is {len(ids):,} tokens but the context is {self.context:,}"
            fix = [
                *[f"--ctx N, up to {max_context:,}"] * (len(ids) < max_context),
                "a shorter prompt",
            ]
            raise IncompatibleError(message, reason=[reason], fix=fix, code="context_overflow")
        inside_thinking = leaves_thinking_open(prompt, ids, self.vocabulary)
        thinking = thinking_budget(self.think, self.vocabulary, bool(inside_thinking))
        if grammar is not None and inside_thinking is not None:
            end = self.vocabulary.prompt_end(ids)
            grammar, inside_thinking = grammar_after_thinking(
                grammar=grammar,
                vocabulary=self.vocabulary,
                prompt=prompt,
                prompt_end=end,
                inside_thinking=inside_thinking,
            )
        request = Request(request_id, tuple(ids), params, grammar=grammar, thinking=thinking)
        return PreparedRequest(request, inside_thinking)

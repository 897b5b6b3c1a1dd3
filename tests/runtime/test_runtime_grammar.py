# mypy: disable-error-code="no-untyped-call"
"""Structured output: masks along drafts, matching texts, and equal texts with and without speculation."""

from __future__ import annotations

import ctypes
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.errors import UsageError
from spd.formats.folder import ModelFolder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Request, SamplingParams
from spd.runtime.engine.device import activate_sequence
from spd.runtime.engine.grammar import MAX_COMPILED, Grammar, GrammarCompiler, Matcher
from spd.runtime.engine.request import GrammarSpec, ThinkingBudget, ThinkingTokens
from spd.runtime.engine.schema_text import MAX_BYTES, MAX_PARTS, MAX_PATTERN_BYTES
from spd.runtime.engine.sequence import NEVER_BEGAN
from spd.runtime.round.limits import mask_width
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.sampling_params import SamplingSteps
from tests.helpers import Patch, get_local_queue, make_fast_engine, random_prompts, run_requests
from tests.runtime.round_distribution import LIMIT_OF_ERROR, difference
from tests.runtime.rule_distribution import RULES, RuleCase, RuleEnumeration
from tests.runtime.target_distribution import number_of

VOCAB = 320
PATTERN = "(ab|cd|[0-9]{3}){4,9}!"
PROPERTIES: dict[str, Any] = {
    "name": {"type": "string", "maxLength": 6},
    "kind": {"enum": ["red", "green"]},
    "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
}
SCHEMA = {
    "type": "object",
    "properties": PROPERTIES,
    "required": [*PROPERTIES],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TEXTS = {
    "regex": GrammarSpec("regex", PATTERN),
    "schema": GrammarSpec("schema", json.dumps(SCHEMA)),
    "lark": GrammarSpec("lark", 'start: "(" start ")" | item item\nitem: /[xyz]{2,5}/ | "-"'),
}
PROMPTS = random_prompts(3, 20, 256)


def fits(kind: str, text: str) -> bool:
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    if kind == "lark":
        inner = text.strip("()")
        return (
            text.count("(") == text.count(")")
            and re.fullmatch("([xyz]{2,5}|-){2}", inner) is not None
        )
    value = json.loads(text)
    return set(value) == {"name", "kind", "list"} and value["kind"] in ("red", "green")


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=2, seed=3)


@pytest.fixture(scope="module")
def compiler(target: Path) -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.open(target), VOCAB)


def requests(temperature: float, count: int = 90) -> list[Request]:
    """Return a request for a grammar of each kind, and one without."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=count) for i in (0, 1, 2, 9)
    ]
    requests_ = [
        Request(kind, PROMPTS[i], params[i], grammar=TEXTS[kind]) for i, kind in enumerate(TEXTS)
    ]
    return [
        *requests_,
        Request("free", PROMPTS[0], replace(params[3], max_tokens=40, repetition_penalty=1.2)),
    ]


NGRAM = {"spec": "ngram", "ngram_min": 1, "draft_max": 4}
ITSELF = {"spec": "draft+ngram", "draft_max": 4, "ngram_min": 2}


CASES: list[tuple[float, dict[str, Any], tuple[int, ...]]] = [
    (0.0, ITSELF, (0, 1)),
    (1.0, ITSELF, (2,)),
    (1.0, NGRAM, (0, 2)),
    *((1.0, {"spec": "draft", "draft_max": 3, "verify": rule}, (2,)) for rule in RULES),
]


@pytest.mark.covers(count=3)
@pytest.mark.parametrize(("temperature", "options", "lags"), CASES)
def test_texts_match(
    target: Path,
    tiny: Callable[..., Path],
    temperature: float,
    options: dict[str, Any],
    lags: tuple[int, ...],
) -> None:
    """Texts equal plain decoding.

    Under rules that test probabilities, those of each request alone.
    """
    batch = requests(temperature)
    tests_probability = "verify" in options
    model = tiny("qwen3", layers=1, seed=4) if tests_probability else target
    options = options if options is NGRAM else {**options, "draft_model": model}
    plain = run_requests(make_fast_engine(target, **(options if tests_probability else {})), batch)
    for kind, run in zip(TEXTS, plain, strict=False):
        assert run.finish_reason in ("stop", "length")
        assert run.finish_reason == "length" or fits(kind, run.text), run.text
    assert sum(run.finish_reason == "stop" for run in plain) >= 2
    runs_by_lag = [
        run_requests(make_fast_engine(target, slots=4, lag=lag, **options), batch) for lag in lags
    ]
    for runs in runs_by_lag:
        assert [run.output for run in runs] == [run.output for run in plain]
        # Waiting for masks costs no draft: what is verified is the same at every lag.
        assert [run.drafts for run in runs] == [run.drafts for run in runs_by_lag[0]]
    assert sum(run.metrics.draft_n_accepted for run in runs_by_lag[0][:3]) > 0


DEMO = ModelFolder.resolve("demo").path
GUIDED: dict[str, dict[str, Any]] = {
    "draft": {"spec": "draft"},
    "draft+ngram": {"spec": "draft+ngram", "ngram_min": 2},
    "mtp": {"spec": "mtp"},
    "ngram": {"spec": "ngram", "ngram_min": 2},
}


@pytest.mark.covers(1, count=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("method", GUIDED)
def test_drafts_obey_the_grammar(
    tiny: Callable[..., Path], method: str, k: int, temperature: float
) -> None:
    """They change no text, at no lag, and every draft that is verified is one that may follow.

    The draft model has other weights than the target.
    """
    model = DEMO if method == "mtp" else tiny("qwen3", layers=2, seed=3)
    config = ModelFolder(model).config
    options = {**GUIDED[method], "draft_max": k, "slots": 3}
    if method.startswith("draft"):
        options["draft_model"] = tiny("qwen3", layers=1, seed=4)
    batch = requests(temperature, 60)
    plain = run_requests(make_fast_engine(model), batch)
    unguided_engine = make_fast_engine(model, **options)
    unguided_engine.round_queue.sampler.guide = None
    unguided = run_requests(unguided_engine, batch)
    runs_by_lag = [
        run_requests(make_fast_engine(model, lag=lag, **options), batch) for lag in (0, 1)
    ]
    for runs in (*runs_by_lag, unguided):
        assert [run.output for run in runs] == [run.output for run in plain]
        assert runs[3].metrics.draft_n_masked == 0, "it has no grammar"
    assert [run.drafts for run in runs_by_lag[0]] == [run.drafts for run in runs_by_lag[1]]
    compiler = GrammarCompiler(Tokenizer.open(model), config.vocab_size)
    for request, run in zip(batch[:3], runs_by_lag[0], strict=False):
        metrics = run.metrics
        assert metrics.draft_n_masked <= metrics.draft_n + k
        assert metrics.draft_n_masked > 0 or method == "ngram"
        grammar = compiler.compile(request.grammar, config.eos_token_ids)
        words = mask_width(config.vocab_size)
        for record in run.rounds:
            rows = torch.empty(len(record.draft) + 1, words, dtype=torch.int32)
            assert grammar.write_masks(record.draft, rows) == len(record.draft)
            for token in record.committed:
                if token not in config.eos_token_ids:
                    grammar.accept_token(token)
        if method in ("draft", "mtp"):
            lengths = [len(record.draft) for record in run.rounds[1:]]
            assert sum(lengths) >= 0.75 * k * len(lengths), (
                "a masked draft is cut off at an end only"
            )
    counts = [sum(run.metrics.draft_n for run in runs[:3]) for runs in (runs_by_lag[0], unguided)]
    assert counts[0] > counts[1] or method == "ngram", "masked drafts are cut off less often"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_with_masked_drafts_are_recorded(temperature: float) -> None:
    """A record draws the drafts that the written round draws, by masks of its own grammar state."""
    batch = requests(temperature, 60)[:2]
    options: dict[str, Any] = {"spec": "mtp", "draft_max": 3, "slots": 1}
    recorded, written = (
        make_fast_engine(DEMO, graphs=graphs, **options) for graphs in (None, False)
    )
    runs, written_runs = (run_requests(engine, batch) for engine in (recorded, written))
    assert [run.output for run in runs] == [run.output for run in written_runs]
    assert [run.drafts for run in runs] == [run.drafts for run in written_runs]
    counts = [run.metrics.draft_n_masked for run in runs]
    assert counts == [run.metrics.draft_n_masked for run in written_runs] and min(counts) > 0
    rounds = get_local_queue(recorded).captured
    assert rounds is not None and written.round_queue.captured is None
    replays = {shape: replay for shape, (replay, _) in rounds.captured.items()}
    assert any(shape.needs.grammar and shape.next_k for shape in replays)
    assert all(replay is not None for replay in replays.values())


@pytest.mark.parametrize("lag", [0, 1])
def test_what_is_forced_makes_a_round_longer(target: Path, monkeypatch: Patch, lag: int) -> None:
    """Rounds without drafts verify forced tokens; who has none is not taken for a failure."""
    grammar = GrammarSpec("regex", "(ab|cd)efghijklmnop(q|r)stuvwxyz!")
    params = SamplingParams(max_tokens=40, temperature=1.0)
    batch = [
        Request("forced", PROMPTS[0], params, grammar=grammar),
        Request("free", PROMPTS[1], params),
    ]
    plain = run_requests(make_fast_engine(target), batch)
    engine = make_fast_engine(target, slots=2, lag=lag, spec="ngram", draft_max=6, adaptive=True)
    monkeypatch.setattr(engine.draft_length, "choose_k", lambda: 0)
    monkeypatch.setattr(engine.draft_length, "longest_k", lambda k: 5)
    rate = engine.draft_length.rate
    runs = run_requests(engine, batch)
    assert [run.output for run in runs] == [run.output for run in plain]
    forced, free = (run.metrics for run in runs)
    assert max(len(record.draft) for record in runs[0].rounds) == 5
    assert forced.draft_n_masked == forced.draft_n == forced.draft_n_accepted >= 15
    assert forced.rounds_waited == forced.rounds < 0.5 * len(plain[0].tokens)
    assert free.draft_n == free.rounds_waited == 0
    assert engine.draft_length.rate == pytest.approx(rate)


def test_what_is_forced_follows_the_allowed_drafts(target: Path, compiler: GrammarCompiler) -> None:
    """The grammar's state stays, and no more than the limit comes back."""
    encode = Tokenizer.open(target).encode
    grammar = compiler.compile(GrammarSpec("regex", "abcde(xy|zw)fgh"), [1])
    beginning = encode("abcde")
    assert grammar.force_drafts([], 20) == beginning
    assert grammar.force_drafts([], 3) == beginning[:3]
    assert grammar.force_drafts([*beginning[:2], *encode("x")], 20) == beginning
    assert grammar.force_drafts([*beginning, *encode("z")], 20) == encode("abcdezwfgh")
    assert grammar.force_drafts([*encode("abcdezwfgh"), 1], 20) == [*encode("abcdezwfgh"), 1]
    rows = torch.empty(2, mask_width(VOCAB), dtype=torch.int32)
    grammar.write_draft_mask(rows[:1])
    grammar.write_masks((), rows[1:])
    assert torch.equal(rows[0], rows[1]), "one token is allowed"
    for token in beginning:
        grammar.accept_token(token)
    assert grammar.force_drafts([], 20) == []
    twin = grammar.copy()
    twin.accept_token(encode("x")[0])
    assert twin.force_drafts([], 20) == encode("yfgh")
    assert grammar.force_drafts(encode("z"), 20) == encode("zwfgh")


def test_requests_without_a_grammar_wait_for_none(target: Path) -> None:
    """At lag 2 a grammar slot sits out two of three rounds.

    The slot beside it takes part in all.
    """
    engine = make_fast_engine(target, slots=2, lag=2)
    queue = engine.round_queue
    launch = engine.round_queue.launch
    rounds = list[list[bool]]()
    queue.launch = lambda *args: rounds.append(queue.state.active.tolist()) or launch(*args)  # type: ignore
    run_requests(engine, [requests(1.0)[3], requests(1.0)[0]])
    assert (
        all(first for first, _ in rounds[:30])
        and 8 <= sum(second for _, second in rounds[:30]) <= 11
    )


def reached(compiler: GrammarCompiler, text: GrammarSpec, tokens: list[int], ends: set[int]) -> Any:
    grammar = compiler.compile(text, ends)
    for token in tokens:
        grammar.accept_token(token)
    return grammar


def allowed(row: torch.Tensor) -> set[int]:
    return {v for v in range(VOCAB) if int(row[v >> 5]) >> (v & 31) & 1}


def mask_of(grammar: Any) -> torch.Tensor:
    row = free_rows(1)
    grammar.write_masks((), row)
    return row[0]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_mask_is_that_of_the_text_with_the_drafts_before_it(
    compiler: GrammarCompiler, kind: str
) -> None:
    """Row by row against a matcher that has accepted those tokens.

    The state is unchanged afterwards.
    """
    ends = {300, 301}
    source = random.Random(len(kind))
    legal_runs = 0
    grammar = compiler.compile(TEXTS[kind], ends)
    accepted = list[int]()
    for _ in range(40):
        probe = reached(compiler, TEXTS[kind], accepted, ends)
        drafts = list[int]()
        while len(drafts) < 5 and not probe.is_finished:  # legal drafts but for one in ten
            options = sorted(allowed(mask_of(probe)) - ends)
            if not options or source.random() < 0.1:
                drafts.append(source.randrange(VOCAB))
                break
            drafts.append(source.choice(options))
            probe.accept_token(drafts[-1])
        rows = free_rows(len(drafts) + 1)
        legal = grammar.write_masks(drafts, rows)
        legal_runs += legal > 1
        for i in range(legal + 1):
            after = reached(
                compiler, TEXTS[kind], accepted + [d for d in drafts[:i] if d not in ends], ends
            )
            if after.is_finished or (i and drafts[i - 1] in ends):
                break
            assert torch.equal(rows[i], mask_of(after)), (accepted, drafts, i)
        if legal < len(drafts) and legal < i + 1:
            assert drafts[legal] not in allowed(rows[legal])
        accepted.append(
            drafts[0] if legal and drafts[0] not in ends else min(allowed(rows[0]) - ends)
        )
        grammar.accept_token(accepted[-1])
        if grammar.is_finished:
            grammar = compiler.compile(TEXTS[kind], ends)
            accepted = []
    assert legal_runs > 3


def free_rows(rows: int) -> torch.Tensor:
    return torch.full((rows, mask_width(VOCAB)), -1, dtype=torch.int32)


def thinking(target: Path) -> tuple[list[int], int, int]:
    """Return the tokens of a plain run, and the index and id of one that first occurs in their middle."""
    plain = run_requests(
        make_fast_engine(target), [Request("p", PROMPTS[1], SamplingParams(max_tokens=30))]
    )[0]
    tokens = plain.tokens
    index = next(i for i in range(6, 30) if tokens[i] not in tokens[:i] and i % 5 in (2, 3))
    return tokens, index, tokens[index]


def lengths_at_masks(queue: LocalRoundQueue) -> list[int]:
    """Return a list that gets a slot's length whenever its masks arrive."""
    lengths: list[int] = []
    set_masks = queue.set_masks

    def recording(slot: int, rows: Tensor, drafts: list[int], legal: int) -> None:
        lengths.append(int(queue.state.length[slot]))
        set_masks(slot, rows, drafts, legal)

    queue.set_masks = recording  # type: ignore[method-assign]
    return lengths


def test_a_grammar_begins_behind_the_end_of_thinking(target: Path) -> None:
    """Also where that token is an accepted draft; rounds before it do not wait for masks."""
    thinking_tokens, at, end = thinking(target)
    text = GrammarSpec("regex", PATTERN, after=end)
    request = Request("t", PROMPTS[1], SamplingParams(max_tokens=60), grammar=text)
    drafts: dict[str, Any] = {"spec": "draft", "draft_model": target, "draft_max": 4}
    runs = []
    for options in ({}, drafts | {"lag": 2}, drafts, {"lag": 1}):
        engine = make_fast_engine(target, **options)
        lengths = lengths_at_masks(get_local_queue(engine))
        runs += run_requests(engine, [request])
        assert min(lengths) == len(PROMPTS[1]) + at + 1, "a round waited for its masks"
    assert all(run.output == runs[0].output for run in runs) and runs[1].drafts == runs[2].drafts
    assert runs[0].tokens[: at + 1] == thinking_tokens[: at + 1]
    assert re.fullmatch(PATTERN, engine.tokenizer.decode(runs[0].tokens[at + 1 :])), runs[0].text
    assert runs[1].drafted[at] and runs[1].drafted[at - 1], (
        "the end was no draft inside an accepted run"
    )


def test_an_end_before_the_grammar_s_is_said(target: Path) -> None:
    """Ends by -n, a stop string and a stop id, but not of a complete text.

    And ends while thinking.
    """
    digits = tuple(range(48, 58))
    thinking_tokens, at, end = thinking(target)
    early = "the text ended before the regex was complete"
    late = GrammarSpec("regex", "a", after=end)
    last = {"max_tokens": 60, "stop_token_ids": (thinking_tokens[at - 1],)}
    cases: list[tuple[GrammarSpec, dict[str, Any], tuple[str, str | None]]] = [
        (GrammarSpec("regex", "[0-9]{9}"), {"max_tokens": 2}, ("length", early)),
        (GrammarSpec("regex", "[0-9]+"), {"max_tokens": 2}, ("length", None)),
        (GrammarSpec("regex", "[0-9]{4}"), {"max_tokens": 9}, ("stop", None)),
        (GrammarSpec("regex", "a[0-9]{4}"), {"stop": ("a",)}, ("stop", early)),
        (GrammarSpec("regex", "a[0-9]{4}"), {"stop_token_ids": digits}, ("stop", early)),
        (late, last, ("error", NEVER_BEGAN)),
        (replace(late, optional=True), last, ("stop", None)),
    ]
    for spec in ({"lag": 2}, NGRAM):
        engine = make_fast_engine(target, **spec)
        for grammar, options, ended in cases:
            prompt = PROMPTS[grammar.after is not None]
            (done,) = engine.generate(
                [Request("a", prompt, SamplingParams(**options), grammar=grammar)]
            )
            assert (done.finish_reason, done.error) == ended, grammar


def test_a_dead_end_is_an_error_and_no_token(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token is allowed after the third: three tokens are returned, and other requests continue."""
    batch = [requests(1.0)[0], requests(1.0)[3]]
    uninterrupted, alone = run_requests(make_fast_engine(target), batch)
    original = Grammar._write_matcher_mask
    remaining_masks = [3]

    def write(self: Grammar, matcher: Matcher, row: torch.Tensor) -> None:
        original(self, matcher, row)
        remaining_masks[0] -= 1
        if remaining_masks[0] < 0:
            row.zero_()

    monkeypatch.setattr(Grammar, "_write_matcher_mask", write)
    engine = make_fast_engine(target, slots=2, lag=2)
    done = engine.generate(batch)
    assert (done[0].finish_reason, list(done[0].token_ids)) == ("error", uninterrupted.tokens[:3])
    assert "grammar dead end" in str(done[0].error)
    assert list(done[1].token_ids) == alone.tokens
    assert engine.page_table.num_available == engine.plan.shape.num_pages - 2


def test_interrupted_grammars_go_on_where_they_were(target: Path) -> None:
    """Also for grammars that begin after a token."""
    batch = [replace(request, prompt_ids=request.prompt_ids * 2) for request in requests(1.0)]
    free = run_requests(
        make_fast_engine(target, ctx=192), [replace(request, grammar=None) for request in batch]
    )
    for request, run in zip([*batch], free, strict=True):
        deferred = request.grammar and replace(request.grammar, after=run.tokens[4], optional=True)
        batch.append(replace(request, id=f"again {request.id}", grammar=deferred))
    alone = [run.output for run in run_requests(make_fast_engine(target, ctx=192), batch)]
    engine = make_fast_engine(
        target, slots=5, ctx=192, cache_pages=3, lag=1, spec="ngram", ngram_min=1
    )
    runs = run_requests(engine, batch)
    assert [run.output for run in runs] == alone
    assert sum(run.metrics.preemptions for run in runs) > 1


MANY = [f".*{n}.*" for n in range(99)]
BAD = [
    ("schema", "{", "expected|EOF"),
    ("schema", '{"type": "nope"}', "Invalid type"),
    ("schema", '{"$ref": "http://example.org/x"}', "not present|retriev"),
    ("schema", "false", "schema is false"),
    ("regex", "(", "invalid regex"),
    ("regex", "(?=a)b", "invalid regex"),
    ("lark", "start: missing", "unknown name"),
    ("lark", "", "[Ee]mpty"),
    ("schema", json.dumps({"const": "a" * MAX_BYTES}), "it is longer than 512 KiB"),
    ("regex", "a" * (MAX_PATTERN_BYTES + 1), "expressions are longer than 64 KiB"),
    (
        "schema",
        json.dumps({"anyOf": [{"pattern": f"{n}b?" * 9000} for n in range(3)]}),
        "expressions are longer",
    ),
    (
        "lark",
        "start: " + " | ".join("/" + f"{n}b?" * 9000 + "/" for n in range(3)),
        "expressions are longer",
    ),
    # each of these keeps the library busy for minutes
    ("schema", '{"type": "integer", "multipleOf": 7436429}', "no common multiple"),
    (
        "schema",
        json.dumps({"allOf": [{"multipleOf": n} for n in (0, 7, 11, 13, 17, 19, 23)]}),
        "no common",
    ),
    ("schema", json.dumps({"type": "string", "allOf": [{"pattern": p} for p in MANY]}), "combines"),
    ("schema", json.dumps({p: {"$ref": "#", "pattern": p} for p in MANY}), "combines"),
    ("schema", json.dumps({"enum": [{"a": n} for n in range(30_000)]}), "it has 60002 parts"),
    (
        "lark",
        f"start: %json {json.dumps({'const': [*range(9000)]})} "
        f"%json {json.dumps({'required': [f'{n}' for n in range(9000)]})}",
        f"it has 18004 parts .*, {MAX_PARTS} at most are supported",
    ),
]


@pytest.mark.parametrize(("kind", "text", "message"), BAD)
def test_what_cannot_be_read_is_refused_at_admission(
    target: Path, kind: Any, text: str, message: str
) -> None:
    engine = make_fast_engine(target)
    flag = {"schema": "--schema", "regex": "--grammar", "lark": "--grammar"}[kind]
    with pytest.raises(UsageError, match=f"^{flag} cannot be used: .*({message})") as caught:
        engine.add(Request("x", (1,), SamplingParams(), grammar=GrammarSpec(kind, text)))
    assert caught.value.fix and not engine.has_work
    assert (
        len(engine.generate([Request("y", (1,), SamplingParams(max_tokens=2))])[0].token_ids) == 2
    )


ENUM_OBJECTS = [{"a": n} for n in range(MAX_PARTS // 2 - 1)]  # with two that hold them
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"enum": ENUM_OBJECTS}, '{"a":7}'),
    ({"enum": [f"value {n}" for n in range(2 * MAX_PARTS)]}, '"value 19999"'),
    ({"description": "a" * 2 * MAX_PARTS, "examples": [[1]] * MAX_PARTS, "const": 1}, "1"),
]


@pytest.mark.parametrize(("schema", "text"), PARTS)
def test_as_many_parts_as_are_supported_are_held(
    compiler: GrammarCompiler, schema: dict[str, Any], text: str
) -> None:
    """An `enum` of plain values is one part; keywords that only describe are none."""
    grammar = compiler.compile(GrammarSpec("schema", json.dumps(schema)), (END,))
    assert grammar is not None
    for byte in text.encode():
        grammar.accept_token(byte)
    assert grammar.is_complete


def test_a_part_more_is_refused(compiler: GrammarCompiler) -> None:
    schema = {"enum": [*ENUM_OBJECTS, []]}
    with pytest.raises(UsageError, match=f"it has {MAX_PARTS + 1} parts"):
        compiler.compile(GrammarSpec("schema", json.dumps(schema)), (END,))


def test_more_symbols_than_the_library_can_number_are_refused_at_the_first_try(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar's text is short; each bound needs symbols of its own."""
    arrays = [{"type": "array", "minItems": 60_000 + n} for n in range(4000)]
    tries: list[str] = []
    matcher = GrammarCompiler._new_matcher

    def counted(self: GrammarCompiler, kind: str, prepared: str) -> object:
        tries.append(prepared)
        return matcher(self, kind, prepared)

    monkeypatch.setattr(GrammarCompiler, "_new_matcher", counted)
    with pytest.raises(UsageError, match="needs more than the 65525 symbols"):
        compiler.compile(GrammarSpec("schema", json.dumps({"anyOf": arrays})), (END,))
    assert len(tries) == 1


def test_compiled_grammars_are_kept_and_few(target: Path) -> None:
    compiler = GrammarCompiler(Tokenizer.open(target), VOCAB)
    for i in range(MAX_COMPILED + 5):
        compiler.compile(GrammarSpec("regex", f"a{{{i}}}b"), ())
    assert compiler._initial_matchers.cache_info().currsize == MAX_COMPILED
    rows = []
    for _ in range(2):
        grammar = compiler.compile(TEXTS["regex"], ())
        rows.append(mask_of(grammar))
        grammar.accept_token(min(allowed(rows[0])))
    assert torch.equal(rows[0], rows[1]), "a kept grammar had moved on"


BEGIN = 300
END = 301


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_however_it_is_made(target: Path, temperature: float) -> None:
    """Prompts inside thinking with three budgets, outside, with a grammar after it, and without a budget."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24, ignore_eos=True)
    free = Request("free", random_prompts(1, 12, 256)[0], params)
    inside = {f"{n}": ThinkingBudget(n, END, BEGIN, inside=True) for n in (0, 1, 7)}
    budgets = {
        **inside,
        "outside": ThinkingBudget(0, END),
        "then": ThinkingBudget(3, END, inside=True),
    }
    batch = [free, *(replace(free, id=name, thinking=budget) for name, budget in budgets.items())]
    batch[-1] = replace(batch[-1], grammar=GrammarSpec("regex", "[ab]{6}", after=END))
    runs = run_requests(make_fast_engine(target), batch)
    plain = {request.id: run for request, run in zip(batch, runs, strict=True)}
    free_tokens = plain["free"].tokens
    assert END not in free_tokens, "else another seed"
    for budget in (0, 1, 7):
        tokens = plain[str(budget)].tokens
        assert (
            tokens[:budget] == free_tokens[:budget]
            and tokens[budget] == END
            and tokens.count(END) == 1
        )
    assert plain["outside"].tokens == free_tokens
    assert plain["then"].tokens[3] == END and plain["then"].finish_reason == "stop"
    assert set(plain["then"].text[-6:]) <= {"a", "b"}
    methods: tuple[dict[str, Any], ...] = (
        {"spec": "ngram", "ngram_min": 1, "draft_max": 3, "lag": int(temperature)},
        {"spec": "draft", "draft_model": target, "draft_max": 4, "lag": 2},
    )
    for options in methods:
        speculated = run_requests(make_fast_engine(target, slots=6, **options), batch)
        assert [run.output for run in speculated] == [run.output for run in runs], options


def test_thinking_ends_where_its_budget_does() -> None:
    """A masked row allows the end of thinking alone, and a draft that continues is not legal there."""

    def legal(tokens: list[int], drafts: list[int], budget: int = 2) -> tuple[int, list[int]]:
        state = Grammar(None, budget=ThinkingBudget(budget, END, BEGIN))
        for token in tokens:
            state.accept_token(token)
        rows = torch.empty(len(drafts) + 1, 10, dtype=torch.int32)
        num_legal = state.write_masks(drafts, rows)
        end_mask = torch.zeros(10, dtype=torch.int32)
        end_mask[END // 32] = 1 << END % 32
        return num_legal, [i for i in range(num_legal + 1) if torch.equal(rows[i], end_mask)]

    assert legal([], [BEGIN, 1, 2, END]) == (4, [3])
    assert legal([], [BEGIN, 1, 2, 3]) == (3, [3])
    assert legal([5, BEGIN, 1], [2, 3]) == (1, [1])
    assert legal([5, 6], [2, 3]) == (2, [])
    assert legal([BEGIN, END, 1], [2, 3, 4]) == (3, [])
    assert legal([BEGIN], [], budget=0) == (0, [0])


# -- rules that test a draft's probability keep the distribution of the masked target ----------------

MIXED = SamplingParams(temperature=0.75, logit_bias=((0, 0.5),), presence_penalty=0.25)


class TableMatcher:
    """A matcher over a table of the tokens that are allowed after each text."""

    def __init__(self, allowed: torch.Tensor, text: tuple[int, ...]) -> None:
        self.allowed = allowed
        self.text = list(text)

    def is_stopped(self) -> bool:
        return False

    is_accepting = is_error = is_stopped

    def get_error(self) -> str:
        return ""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        bits = sum(
            1 << v for v in range(self.allowed.shape[1]) if self.allowed[number_of(self.text), v]
        )
        ctypes.c_int32.from_address(pointer).value = bits
        assert size == 4

    def try_consume_tokens(self, tokens: list[int]) -> int:
        (token,) = tokens
        if not self.allowed[number_of(self.text), token]:
            return 0
        self.text.append(token)
        return 1

    def deep_copy(self) -> TableMatcher:
        return TableMatcher(self.allowed, tuple(self.text))

    def compute_ff_tokens(self) -> list[int]:
        return []

    def rollback(self, count: int) -> None:
        del self.text[len(self.text) - count :]


class GrammarEnumeration(RuleEnumeration):
    """All cases; the program sets each slot's masks before each round."""

    def __init__(self, case: RuleCase, table: torch.Tensor, allowed: torch.Tensor) -> None:
        self.allowed = allowed
        super().__init__(case, table)

    def prepare(self, needs: SamplingSteps, k: int) -> SamplingSteps:
        nothing: Any = None
        queue = LocalRoundQueue(
            round_=self.round,
            captured=None,
            snapshots=nothing,
            threads=nothing,
            draft_limit=0,
            is_only_rank=True,
        )
        for slot in self.state.active.nonzero()[:, 0].tolist():
            text = tuple(self.state.tokens[slot, : int(self.state.length[slot])].tolist())
            grammar = Grammar(TableMatcher(self.allowed, text))
            sequence: Any = SimpleNamespace(grammar=grammar, slot=slot, defers_grammar=False)
            activate_sequence(
                queue, sequence, self.state.draft[slot, :k].tolist(), self.rule_case.rule
            )
        return replace(needs, grammar=True)


def distribution_error(case: RuleCase) -> float:
    """Return the largest difference of the rounds' distribution from the masked target's."""
    table, allowed = case.table(), case.table(1, masked=True).isfinite()
    masked = table.masked_fill(~allowed, float("-inf"))
    with torch.inference_mode():
        return difference(case, masked, GrammarEnumeration(case, table, allowed).all_masses())


@pytest.mark.covers(1, count=3)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "certain"])
@pytest.mark.parametrize("ks", [(1,), (2,), (1, 1), pytest.param((3,), marks=pytest.mark.slow)])
def test_rounds_have_the_distribution_of_the_masked_target(
    ks: tuple[int, ...], drawn: bool, rule: str
) -> None:
    assert distribution_error(RuleCase(ks, MIXED, seed=4, rule=rule, drawn=drawn)) < LIMIT_OF_ERROR


@pytest.mark.parametrize("rule", RULES)
def test_drafts_cut_away_unseen_are_a_bias(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropping a forbidden draft untested, as the coupled rule does, is detected here."""
    monkeypatch.setitem(
        globals(),
        "activate_sequence",
        lambda *arguments, honest=activate_sequence: honest(*arguments[:3], "coupled"),
    )
    assert distribution_error(RuleCase((2,), seed=4, rule=rule)) > 1e-3


def test_a_mark_in_thinking_begins_no_grammar(target: Path) -> None:
    """Where the prompt is inside thinking; after its end the mark begins the grammar."""
    thinking_tokens, at, mark = thinking(target)
    never = next(token for token in range(256) if token not in thinking_tokens)
    base = GrammarSpec("regex", PATTERN, after=mark, optional=True)
    around = {
        "in": ThinkingTokens(None, never, inside=True),
        "behind": ThinkingTokens(None, thinking_tokens[at - 1], inside=True),
        "out": ThinkingTokens(None, never),
    }
    params = SamplingParams(max_tokens=30)
    batch = [
        Request(name, PROMPTS[1], params, grammar=replace(base, thinking=tokens))
        for name, tokens in around.items()
    ]
    drafts: dict[str, Any] = {"spec": "draft", "draft_model": target, "draft_max": 4}
    for options in ({}, {"lag": 2}, drafts, drafts | {"lag": 2}, NGRAM):
        engine = make_fast_engine(target, slots=3, **options)
        within, behind, out = run_requests(engine, batch)
        assert within.tokens == thinking_tokens, options
        assert behind.tokens == out.tokens and out.tokens[: at + 1] == thinking_tokens[: at + 1]
        text = engine.tokenizer.decode(out.tokens[at + 1 :])
        assert re.match("(ab|cd|[0-9]{3})+", text), (options, text)


def test_where_thinking_begins_and_ends(target: Path) -> None:
    """By its tokens among the first of a reply, by the prompt, and in drafts."""
    matcher = GrammarCompiler(Tokenizer.open(target), VOCAB)._initial_matcher("regex", "x")
    for tokens, drafts, inside, begun in (
        ([BEGIN, 7], [], False, False),
        ([BEGIN, END, 7], [], False, True),
        ([5, 6, BEGIN, 7], [], False, True),
        ([7], [], True, False),
        ([END, 7], [], True, True),
        ([], [7], True, False),
    ):
        around = ThinkingTokens(BEGIN, END, inside)
        state = Grammar(matcher.deep_copy(), GrammarSpec("regex", "x", after=7, thinking=around))
        assert not tokens or state.begins_after(tokens) == begun
        for token in tokens:
            state.accept_token(token)
        assert state.has_begun == begun
        rows = torch.empty(len(drafts) + 1, 10, dtype=torch.int32)
        assert state.write_masks(drafts, rows) == len(drafts) and (
            begun or bool((rows == -1).all())
        )


CHAIN = '"d{}": {{"properties": {{"a": {{"$ref": "#/$defs/d{}"}}}}}}'


@pytest.mark.parametrize("kind", ["schema", "lark"])
def test_long_chains_of_references_end_no_process(target: Path, kind: str) -> None:
    """In a separate thread, as in a server, where the stack is small."""
    if kind == "lark":
        rules = [f'r{n}: "x" r{n + 1} | "y"' for n in range(9_000)]
        text = "\n".join(["start: r0", *rules, 'r9000: "z"'])
    else:
        definitions = [CHAIN.format(n, n + 1) for n in range(3_000)]
        text = f'{{"$ref": "#/$defs/d0", "$defs": {{{", ".join(definitions)}, "d3000": {{}}}}}}'
    code = (
        "import sys, threading; from pathlib import Path;"
        "from spd.formats.tokenizer import Tokenizer;"
        "from spd.runtime.engine.grammar import GrammarCompiler;"
        "from spd.runtime.engine.request import GrammarSpec;"
        "compiler = GrammarCompiler(Tokenizer.open(Path(sys.argv[1])), int(sys.argv[2]));"
        "text = GrammarSpec(sys.argv[3], sys.stdin.read());"
        "work = lambda: print(compiler.compile(text, (1,)).is_complete);"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    command = [sys.executable, "-c", code, str(target), str(VOCAB), kind]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "False\n"), run.stderr[-500:]

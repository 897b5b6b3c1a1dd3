"""The recipe that trains drafters for any target, on a tiny one: data, slices, what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spd.runtime import SamplingParams
from tests.helpers import make_engine, run_all
from tests.recipes import drafter_prompts, tiny, train_drafter
from tests.recipes.drafter_data import DataPlan, Target, data_digest, make_batch, make_files
from tests.recipes.drafter_heads import Rows, at, load_weights
from tests.runtime.block_reference import PlainBlock
from tests.runtime.eagle3_reference import PlainEagle3
from tests.runtime.test_runtime_mtp import compare_drafts

TAPS = (1, 3)
PLAN = DataPlan(TAPS, rows=6, prompt_tokens=60, reply_tokens=24)
QUESTIONS = ("What is it?", "Name one.", "Why?", "Tell me more of it.", "And then?", "Who?")
KINDS = ("eagle3", "dflash", "dspark")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**tiny.VARIANTS["llama2"], "layers": 4, "tie": False}
    return tiny.write_tiny(tmp_path_factory.mktemp("target"), **shape)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.open(folder)


@pytest.fixture(scope="module")
def work(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two files of data."""
    work = tmp_path_factory.mktemp("work")
    write_data(target, work)
    return work


def write_data(target: Target, work: Path) -> None:
    def question(number: int) -> str:
        return QUESTIONS[number % 6] + str(number)

    list(make_files(target, question, work / "data", PLAN, range(2)))


def train(target: Target, work: Path, out: Path, kind: str, **options: Any) -> dict[str, Any]:
    words = f"train --kind {kind} --target x --files 2 --rows 4 --draft-vocab 60 --block 4"
    words += f" --heads 2 --head-dim 16 --intermediate 48 --threads 1 --work {work} --out {out}"
    arguments = train_drafter.parse(words.split())
    vars(arguments).update(options)
    return train_drafter.train(target, arguments)


def test_data_are_the_target_s_own_and_repeatable(
    target: Target, work: Path, tmp_path: Path
) -> None:
    """Rows with padding, a shared beginning and ends at different steps are as in plain passes."""
    write_data(target, tmp_path)
    paths, again = (sorted((place / "data").glob("*.safetensors")) for place in (work, tmp_path))
    assert data_digest(paths) == data_digest(again)
    prompts = [target.encode_chat(text) for text in QUESTIONS]
    target.model.generation_config.eos_token_id = list(range(0, 200, 3))  # some rows end early
    batch = make_batch(target, prompts, PLAN, 0)
    target.model.generation_config.eos_token_id = [258, 256]
    assert len(set((batch["lengths"] - batch["starts"]).tolist())) > 2
    for row, ids in enumerate(batch["ids"].split(batch["lengths"].tolist())):
        first = int(batch["lengths"][:row].sum())
        span = slice(first, first + len(ids) - 1)
        with torch.inference_mode():
            out = target.model.model(ids[None].long(), output_hidden_states=True)
        best = (out.last_hidden_state[0] @ target.head.T).argmax(-1)[:-1]
        assert torch.equal(batch["best"][span, 0].long(), best)
        streams = torch.stack([out.hidden_states[tap][0, :-1] for tap in TAPS], dim=1)
        torch.testing.assert_close(batch["streams"][span].float(), streams, rtol=0.02, atol=0.02)
        if row % 4 < 3:  # greedy
            start = int(batch["starts"][row])
            assert torch.equal(ids[start:].long(), best[start - 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_equals_uninterrupted(
    target: Target, work: Path, tmp_path: Path, kind: str
) -> None:
    straight = train(target, work, tmp_path / "whole", kind, steps=4, decay=2)
    (work / f"{kind}.pt").unlink()
    stop_after(2, target, work, tmp_path / "parts", kind, steps=4, decay=2)
    resumed = train(target, work, tmp_path / "parts", kind, steps=4, decay=2)
    (work / f"{kind}.pt").unlink()
    whole_weights, parts = (
        load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts")
    )
    assert resumed["steps"] == [2, 4] and straight["steps"] == [0, 4]
    assert resumed["data"] == straight["data"]
    for name, tensor in whole_weights.items():
        assert torch.equal(tensor, parts[name]), name
    names = {"embed_tokens.weight", "lm_head.weight"}
    assert not names & set(parts)  # the target's


def stop_after(last: int, *arguments: Any, **options: Any) -> None:
    """Train as a slice does whose time is over after some steps."""
    advance = train_drafter.Training.advance

    class Stopped(Exception):
        """The slice's end."""

    def limited(training: Any, *data: Any) -> Any:
        if training.step == last:
            raise Stopped
        return advance(training, *data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_drafter.Training, "advance", limited)
        with pytest.raises(Stopped):
            train(*arguments, save_minutes=0.0, **options)


def test_a_head_begins_no_worse_than_a_guess(folder: Path, tmp_path: Path) -> None:
    """It begins so behind streams whose elements differ much in size, too."""
    gains = 30 ** torch.randn(64, generator=torch.Generator().manual_seed(0))
    wide = Target.open(folder)
    wide.embedding.mul_(gains)
    write_data(wide, tmp_path)
    record = train(wide, tmp_path, tmp_path / "out", "eagle3", steps=1, report=1)
    (point,) = record["points"]
    assert point["loss"][0] < math.log(60) + 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_s_drafts_are_the_reference_s_and_spd_s(
    folder: Path, target: Target, work: Path, tmp_path: Path, kind: str
) -> None:
    """A drafter that has barely been trained says the same in all three."""
    out = tmp_path / "out"
    train(target, work, out, kind, steps=2)
    (work / f"{kind}.pt").unlink()
    method = "eagle3" if kind == "eagle3" else "block"
    engine = make_engine(folder, spec=method, draft_model=out, draft_max=3)
    plain = (PlainEagle3 if kind == "eagle3" else PlainBlock)(folder, out)
    prompt = tuple(target.encode_chat("What is it?"))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    (run,) = run_all(engine, [prompt], [params])
    wrong, compared, _ = compare_drafts(plain, [(prompt, run)])
    assert wrong == 0 and compared > 5
    text = [*prompt, *run.tokens]
    hidden = plain.hidden(text)
    compared = 0
    for end in range(len(prompt), len(text), 3):
        expected, gap = plain.draft(text[:end], 3, hidden[:end])
        if gap > 1e-3:
            drafts = recipe_drafts(target, out, kind, work, [*text[:end], *expected])
            assert drafts[end - 2] == expected
            compared += 1
    assert compared > 3


def recipe_drafts(
    target: Target, out: Path, kind: str, work: Path, text: list[int]
) -> list[list[int]]:
    """Return the recipe's drafts behind each position of a text."""
    words = f"train --kind {kind} --target x --work {work} --out {out} --block 4"
    words += " --heads 2 --head-dim 16 --intermediate 48"
    arguments = train_drafter.parse(words.split())
    weights, draft_ids = load_weights(out)
    drafter = train_drafter.new_drafter(target, len(draft_ids), arguments)
    drafter.load_state_dict(weights)
    ids = torch.tensor([text])
    with torch.inference_mode():
        hidden = target.model.model(ids, output_hidden_states=True).hidden_states
        tables = train_drafter.Tables.of(target, draft_ids)
        rows = Rows(
            ids=ids,
            streams=torch.cat([hidden[tap] for tap in TAPS], dim=-1),
            best=ids[..., None],
            chances=ids[..., None],
            is_known=ids > 0,
            firsts=torch.tensor([1]),
            starts=torch.tensor([1]),
            lengths=torch.tensor([len(text)]),
        )
        anchors = torch.arange(len(text) - 1)[None]
        drafts = []
        for step, state in enumerate(drafter.states(rows, tables.embedding, anchors, 3)):
            logits = state[0] @ tables.head.T
            before = at(ids, anchors + 1 + step)[0]
            bias = drafter.bias(before)
            drafts.append(draft_ids[(logits if bias is None else logits + bias).argmax(-1)])
    return torch.stack(drafts, dim=1).tolist()


def test_prompts_are_functions_of_their_numbers() -> None:
    text = "Return the sum of all numbers in a list. Raise TypeError for other values."
    names = [drafter_prompts.Documented(f"math.sum{n}", text) for n in range(3)]
    sources = drafter_prompts.Sources(names, ["def add(first, second):\n    return first + second"])
    pairs = [drafter_prompts.make_prompt(sources, number) for number in range(200)]
    assert pairs == [drafter_prompts.make_prompt(sources, number) for number in range(200)]
    assert [category for category, _ in pairs[:5]] == list(drafter_prompts.CATEGORIES)
    assert len({prompt for _, prompt in pairs}) > 130
    assert not [prompt for _, prompt in pairs if "{" in prompt]
    bench = Path("spd/runtime/lab/prompts.jsonl").read_text().splitlines()
    measured = {json.loads(line)["prompt"] for line in bench}
    assert not measured & {prompt for _, prompt in pairs}

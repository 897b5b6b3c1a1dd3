"""`spd generate --jsonl`: order, errors, seeds and resuming."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.cli.commands.jsonl import _line_prompt, parse_line_fields
from spd.conversation.prompt import Prompt
from spd.errors import UsageError
from spd.formats.files import open_output
from spd.runtime import Engine
from spd.runtime.engine.request import derived_seed
from tests.cli.cli_processes import finish, start
from tests.cli.conftest import assert_refused, command_words, wait_until
from tests.json_schema import faults

Lines = Callable[..., tuple[Any, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=1)


@pytest.fixture
def answers(spd_run: Callable[..., Any], target: Path) -> Lines:
    """Return a function that runs lines through `spd generate --jsonl` and reads the replies."""

    def run(lines: list[Any], *argv: object) -> tuple[Any, list[dict[str, Any]]]:
        common = [
            "--jsonl",
            "-m",
            target,
            "--threads",
            1,
            "--ctx",
            256,
            "-n",
            8,
            "--dtype",
            "float32",
        ]
        ran = spd_run("generate", common, command_words(argv), stdin=text_of(lines).encode())
        replies = [json.loads(line) for line in ran.out.splitlines()]
        assert [fault for reply in replies for fault in faults(reply, "generate.line")] == []
        return ran, replies

    return run


def make_prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"q{i}", "prompt": f"word {i}", "params": {"max_tokens": 1 + i % 7}}
        for i in range(count)
    ]


def with_params(**values: Any) -> dict[str, Any]:
    return {"prompt": "x", "params": values}


def text_of(lines: list[Any]) -> str:
    """Return lines of JSON; strings are taken as they are."""
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


def test_answers_come_in_order_and_each_can_be_replayed_by_its_seed(answers) -> None:
    ran, replies = answers(make_prompts(30), "--seed", 3, "--concurrency", 4)
    assert ran.code == 0 and ran.err == ""
    assert [reply["id"] for reply in replies] == [f"q{i}" for i in range(30)]
    assert [reply["usage"]["completion_tokens"] for reply in replies] == [
        1 + i % 7 for i in range(30)
    ]
    assert [reply["line"] for reply in replies] == list(range(1, 31))
    lines = [{"prompt": f"a {i}", "params": {"temperature": 1.0}} for i in range(5)]
    _, replies = answers(lines, "--seed", 11, "--concurrency", 5)
    assert [reply["seed"] for reply in replies] == [derived_seed(11, n) for n in range(1, 6)]
    assert len({reply["seed"] for reply in replies}) == 5 and all(
        reply["seed"] < 2**53 for reply in replies
    )
    alone = {**lines[3], "params": {"temperature": 1.0, "seed": replies[3]["seed"]}}
    _, again = answers([alone])
    assert (again[0]["text"], again[0]["token_ids"]) == (
        replies[3]["text"],
        replies[3]["token_ids"],
    )
    _ = answers(lines)
    unseeded = answers(lines)
    assert unseeded[1][0]["seed"] != replies[0]["seed"]


INVALID_LINES: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ({}, "one of prompt, messages and prompt_ids"),
    ({"prompt_ids": []}, "one of prompt, messages and prompt_ids"),
    ({"prompt": "x", "messages": []}, "one of prompt, messages and prompt_ids"),
    ({"prompt": 3}, "Invalid 'prompt': expected a string"),
    ({"prompt": "\ud800"}, "lone U+D800"),
    ({"prompt": "x", "promt": 1}, "Unknown parameter: 'promt'"),
    (with_params(temperature="hot"), "'params.temperature': expected a number"),
    (with_params(max_tokens=True), "'params.max_tokens': expected a number"),
    (with_params(heat=1), "Unknown parameter: 'params.heat'"),
    (with_params(stop_token_ids=[99999]), "token id 99999 is not in the vocabulary"),
    (with_params(regex="("), "--grammar cannot be used"),
    (with_params(max_tokens=10**400), "'params.max_tokens': expected a value"),
    (with_params(temperature=-(10**400)), "'params.temperature': is beyond all"),
    (with_params(regex="a", schema={}), "params.schema and params.regex each say"),
    ({"prompt_ids": [10**400]}, "'prompt_ids[0]': expected a value"),
    ({"prompt_ids": [99999]}, "token id 99999 is not in the vocabulary"),
    ({"prompt_ids": 7}, "'prompt_ids': expected an array"),
    ('{"prompt": "x", "id": ' + "[" * 900 + "]" * 900 + "}", "neither a text nor a number"),
    (
        '{"prompt": "x", "params": {"schema": ' + '{"a":' * 900 + "1" + "}" * 902,
        "--schema cannot be used",
    ),
    ({"prompt": "x " * 3000}, "but the context is 256"),
    ({"messages": [{"role": "user"}]}, "has no text in `content`"),
    ({"prompt_ids": [1], "system": "s"}, "`prompt_ids` is the whole prompt here"),
    (
        {"messages": [{"role": "system", "content": "a"}], "system": "b"},
        "the system message is given twice",
    ),
]


def test_what_is_wrong_with_a_line_is_said_in_its_place(answers: Lines) -> None:
    good = {"prompt": "good", "params": {"max_tokens": 2}}
    lines = [line for bad, _ in INVALID_LINES for line in (bad, good)]
    ran, replies = answers(lines)
    assert ran.code == 7 and ran.err.startswith(
        f"error: {len(INVALID_LINES)} of {len(lines)} lines failed"
    )
    assert len(replies) == len(lines)
    for i, (_, expected) in enumerate(INVALID_LINES):
        assert expected in replies[2 * i]["error"]["message"], replies[2 * i]
        assert replies[2 * i]["line"] == 2 * i + 1 and replies[2 * i]["error"]["code"]
        assert replies[2 * i + 1]["usage"]["completion_tokens"] == 2


def test_plain_lines_are_refused_with_a_command_that_makes_them_json(
    spd_run, answers, model, tmp_path
) -> None:
    plain = tmp_path / "the questions"
    plain.write_text('Who?\n\n"Why", she said\n')
    argv = ["generate", "--jsonl", "-m", model, "-n", 2]
    convert = "jq -cR 'select(length > 0) | {prompt: .}'"
    ran = spd_run(argv, "-f", plain)
    assert_refused(ran, 2, "no line of", f"fix: {convert} '{plain}' | spd generate --jsonl\n")
    ran = spd_run(argv, stdin=plain.read_bytes())
    assert_refused(ran, 2, "no line of stdin", f"fix: … | {convert} | spd generate --jsonl\n")
    if shutil.which("jq"):
        made = subprocess.run(["sh", "-c", f"{convert} '{plain}'"], capture_output=True, check=True)
        assert [json.loads(line) for line in made.stdout.splitlines()] == [
            {"prompt": "Who?"},
            {"prompt": '"Why", she said'},
        ]
    one_object, replies = answers(['\ufeff {"prompt": "Hi"}', "plain"], "-n", 2)
    assert one_object.code == 7 and "not JSON" in replies[1]["error"]["message"]


def test_shared_messages_precede_the_prompt_of_each_line(answers, tmp_path) -> None:
    """A line's own system message replaces the shared one, which is prefilled once."""
    s, t = ({"role": "system", "content": c} for c in "st")
    q, a, x = (
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"), ("user", "x"))
    )

    def line_prompt(
        line: dict[str, Any], *messages: dict[str, str], raw: bool = False, **variables: Any
    ) -> Prompt:
        return _line_prompt(
            parse_line_fields(line, ""), Prompt(messages=messages, variables=variables), raw
        )

    assert line_prompt({"prompt": "x"}, s, q, a).messages == (s, q, a, x)
    for own_line in (
        {"prompt": "x", "system": "t"},
        {"messages": [t, x]},
        {"messages": [x], "system": "t"},
    ):
        assert line_prompt(own_line, s, q, a).messages == (t, q, a, x)
        assert line_prompt(own_line, q, a).messages == (t, q, a, x)
        assert line_prompt(own_line).messages == (t, x)
    assert line_prompt({"prompt": "x"}, raw=True).text == "x" and line_prompt(
        {"prompt_ids": [1]}
    ).ids == (1,)
    with pytest.raises(UsageError, match="is the whole prompt here"):
        line_prompt({"prompt_ids": [1]}, s)
    with pytest.raises(
        UsageError, match="no chat template: --template-arg and --think would do nothing"
    ):
        line_prompt({"prompt_ids": [1]}, thinking=False)
    assert line_prompt({"prompt": "x"}, thinking=False).variables == {"thinking": False}
    with pytest.raises(UsageError, match="is the whole prompt here"):
        line_prompt({"prompt": "x", "system": "t"}, raw=True)
    chat = tmp_path / "chat.json"
    shared = [{"role": "system", "content": "s " * 60}, {"role": "user", "content": "q"}]
    chat.write_text(json.dumps(shared))
    lines = [{"prompt": f"{i}"} for i in range(6)]
    for flags in (["--system", "s " * 60], ["--messages", chat]):
        _, replies = answers(lines, flags, "--concurrency", 3)
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert cached[0] == 0 and min(cached[1:]) >= 64, cached
    full_chat = {
        "messages": [*shared, {"role": "user", "content": "3"}],
        "params": {"seed": replies[3]["seed"]},
    }
    _, alone = answers([full_chat])
    assert alone[0]["token_ids"] == replies[3]["token_ids"]


def test_the_grammar_of_a_line_replaces_that_of_the_flag(answers: Lines) -> None:
    lines = [{"prompt": "x"}, with_params(regex="[0-9]{2}"), {"prompt": "z"}]
    _, replies = answers(lines, "--grammar", "/yes|no/", "--spec", "ngram")
    for pattern, reply in zip(("yes|no", "[0-9]{2}", "yes|no"), replies, strict=True):
        assert re.fullmatch(pattern, reply["text"])


def test_output_is_gone_on_with_as_it_is_written(answers, tmp_path) -> None:
    """It continues after the last complete line; ids are compared as they are spelled."""
    out = tmp_path / "out.jsonl"
    lines = [*make_prompts(6), "broken", *make_prompts(2)]
    ran, _ = answers(lines, "--seed", 5, "-o", out)
    full_output = out.read_bytes()
    assert ran.code == 7 and ran.out == b"" and full_output.count(b"\n") == 9
    ends = [m.end() for m in re.finditer(b"\n", full_output)]

    def without_times(data: bytes) -> list[Any]:
        """Return the lines without times and usage, which differ with a fresh cache."""
        strip = re.compile(rb'"(timings|usage)": \{([^{}]|\{[^{}]*\})*\}')
        return [json.loads(strip.sub(b'"x": 0', line)) for line in data.splitlines()]

    for num_bytes in (0, ends[3], ends[3] + 25, ends[6], len(full_output)):
        out.write_bytes(full_output[:num_bytes])
        ran, _ = answers(lines, "--seed", 5, "-o", out, "--resume")
        assert ran.code == 7 and "1 of 9 lines failed" in ran.err
        assert without_times(out.read_bytes()) == without_times(full_output)
    out.unlink()
    assert (
        answers(make_prompts(2), "-o", out, "--resume")[0].code == 0
        and out.read_bytes().count(b"\n") == 2
    )
    out = tmp_path / "out.jsonl"
    lines = [f'{{"id": {name}, "prompt": "x"}}' for name in ('"\\ud800"', "1e400", "NaN", "2.0")]
    assert answers(lines, "-o", out)[0].code == 0
    full_output = out.read_bytes()
    assert answers(lines, "-o", out, "--resume")[0].code == 0 and out.read_bytes() == full_output


@pytest.mark.parametrize("content", ["a diary", '{"id": null, "line": 1}\ntext\n', "{}", None])
def test_resuming_does_not_touch_what_is_no_output(answers, tmp_path, content) -> None:
    """Neither is the output of another input."""
    out = tmp_path / "out.jsonl"
    if content is None:
        answers([{"id": "other", "prompt": "x"}, *make_prompts(2)], "-o", out)
    else:
        out.write_text(content)
    before = out.read_bytes()
    ran, _ = answers(make_prompts(3), "-o", out, "--resume")
    assert_refused(ran, 2, "line 1 does not answer the input's line 1", "another -o FILE")
    assert out.read_bytes() == before


def test_a_failed_step_costs_the_lines_that_ran(
    answers: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out once: the lines decoded then fail, the others are answered."""
    real_enqueue = Engine._enqueue_round
    count = 0

    def enqueue(self: Engine) -> bool:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError
        return real_enqueue(self)

    monkeypatch.setattr(Engine, "_enqueue_round", enqueue)
    ran, replies = answers([{"prompt": f"{i}"} for i in range(8)], "--concurrency", 2)
    assert ran.code == 7 and "note: out of memory" in ran.err
    failed = [reply["line"] for reply in replies if "error" in reply]
    assert failed == [1, 2] and len(replies) == 8
    assert replies[0]["error"] == {"code": "engine", "message": "memory ran out"}


def test_an_interrupt_leaves_whole_lines(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    source.write_text(text_of([{"prompt": f"word {i}"} for i in range(2000)]))
    flags = ["--threads", "1", "--ctx", "256", "-n", "9", "--seed", "1", "--concurrency", "2"]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "spd",
        "generate",
        "--jsonl",
        "-m",
        target,
        "-f",
        source,
        "-o",
        out,
    ]
    process = start([*command, *flags])
    wait_until(lambda: process.poll() is not None or (out.exists() and out.stat().st_size > 2000))
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == -signal.SIGINT
    lines = out.read_bytes().splitlines(keepends=True)
    assert lines[-1].endswith(b"\n")
    assert [json.loads(line)["line"] for line in lines] == list(range(1, len(lines) + 1))
    assert (
        "stopping…" in err
        and f"stopped after {len(lines):,} of 2,000 lines; --resume goes on" in err
    )


def test_a_line_that_is_far_too_long_is_refused_in_its_place(answers: Lines) -> None:
    """The other lines are answered."""
    ran, replies = answers([*make_prompts(1), {"prompt": "word " * 300_000}, *make_prompts(1)])
    assert ran.code == 7 and [list(reply)[-1] == "error" for reply in replies] == [
        False,
        True,
        False,
    ]
    assert "1,500,000 characters" in replies[1]["error"]["message"] or "far more" in str(
        replies[1]["error"]
    )


def test_a_second_writer_of_a_file_is_refused(answers: Lines, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    answers(make_prompts(2), "-o", out)
    before = out.read_bytes()
    first = open_output(out, append=True)
    for flags in ((), ("--resume",)):
        assert_refused(
            answers(make_prompts(3), "-o", out, flags)[0],
            2,
            f"{out}: another process is writing it",
        )
    assert out.read_bytes() == before
    os.close(first)
    assert (
        answers(make_prompts(3), "-o", out, "--resume")[0].code == 0
        and out.read_bytes().count(b"\n") == 3
    )

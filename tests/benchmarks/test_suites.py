"""The suites count wrong outcomes, and texts are made as models write them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suites import __main__ as suites
from benchmarks.suites import (
    histories,
    hostile,
    hostile_folders,
    hostile_requests,
    hostile_worker,
    replies,
    reply_schemas,
    schema_suite,
    server_tests,
    tables,
)
from benchmarks.suites.hostile_folders import Command
from benchmarks.suites.hostile_requests import Hostile
from benchmarks.suites.junit import count_junit
from benchmarks.suites.report import KEPT_DETAILS, WRONG, Report
from spd.conversation.tools.call_forms import FORMS
from spd.conversation.tools.call_grammar import Tools


def test_a_report_counts_and_keeps_wrong_ones() -> None:
    report = Report("s", "made")
    report.add("a", "held")
    for number in range(KEPT_DETAILS + 5):
        report.add("a", WRONG, f"case {number}")
    other = Report("s", "made")
    other.add("b", "held")
    report.merge(other)
    assert report.total == {"held": 2, WRONG: KEPT_DETAILS + 5}
    assert report.details[0] == "a: case 0"
    assert len(report.details) == KEPT_DETAILS
    assert f"{KEPT_DETAILS + 5} wrong" in report.text()


def test_an_instance_has_a_text_for_each_order_and_number() -> None:
    texts = {*schema_suite.texts_of({"a": 1.0, "b": ["é"]})}
    assert '{"a": 1.0, "b": ["é"]}' in texts
    assert '{"b": ["\\u00e9"], "a": 1}' in texts
    assert len(texts) == 2 * 2 * 2


def test_an_extra_property_is_closed_by_design() -> None:
    schema = {"properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    assert schema_suite.is_closed_by_design(schema, {"a": 1, "z": 2})
    assert not schema_suite.is_closed_by_design(schema, {"a": {"b": 1}})
    assert not schema_suite.is_closed_by_design({"type": "object"}, {"z": 2})


def test_the_schema_suite_finds_what_a_grammar_has_wrong(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], int, bool]] = [
        ({"type": "integer"}, 3, True),
        ({"type": "integer"}, 3, False),
        ({"not": {}}, 3, False),
    ]
    groups = [
        {"schema": schema, "tests": [{"data": data, "valid": valid}]}
        for schema, data, valid in cases
    ]
    folder = tmp_path / "json" / "tests" / "draft7"
    folder.mkdir(parents=True)
    (folder / "type.json").write_text(json.dumps(groups))
    report = schema_suite.run(tmp_path)
    assert report.rows["type"] == {
        schema_suite.HELD: 1,
        WRONG: 1,
        schema_suite.REFUSED: 1,
    }


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_in_each_form_is_read(name: str, tmp_path: Path) -> None:
    """With the simplest schema the checker finds the call full and cut, and misses a broken one."""
    case = reply_schemas.Case(
        {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]}, []
    )
    form = FORMS[name]
    arguments = {"k": "two words"}
    text = replies.call_text(form, case.schema, arguments)
    checker = replies.Checker(tmp_path)
    scripted = replies.Scripted(name, form, case, arguments, text)
    read = checker._read(scripted, Tools(scripted.functions, form), 5)
    assert read == ""
    broken = scripted.__class__(name, form, case, arguments, text.replace("two", "one"))
    assert "read as" in checker._read(broken, Tools(scripted.functions, form), 5)


def test_histories_are_the_same_and_fit_each_api() -> None:
    first = histories.histories(40)
    assert first == histories.histories(40)
    called = next(history for history in first if any(turn.calls for turn in history))
    ids = [call.id for turn in called for call in turn.calls]
    chat = histories.as_chat(called)
    assert [history["tool_call_id"] for history in chat if history["role"] == "tool"] == ids
    items = histories.as_response(called)
    outputs = [history["call_id"] for history in items if history["type"] == "function_call_output"]
    assert outputs == ids
    blocks = [
        block
        for message in histories.as_messages(called)
        for block in message["content"]
        if isinstance(block, dict)
    ]
    assert [history["tool_use_id"] for history in blocks if history["type"] == "tool_result"] == ids
    plain = histories.plain_chat(called)
    assert all(isinstance(message["content"], str) for message in plain)


def answer(text: str, reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"finish_reason": reason, "message": {"content": text}}]}


FORM = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("hostile_request", "status", "answer", "outcome"),
    [
        (Hostile("a", "/", {}, refuse=True), 200, answer("x"), WRONG),
        (Hostile("a", "/", {}), 500, {"error": {"message": "m"}}, WRONG),
        (Hostile("a", "/", {}), 400, {"error": {"message": "m"}}, hostile.REFUSED),
        (Hostile("a", "/", {}, named="n"), 400, {"error": {"message": "m"}}, WRONG),
        (Hostile("a", "/", FORM), 200, answer("{"), WRONG),
        (Hostile("a", "/", FORM), 200, answer("{", "length"), hostile.CUT),
        (Hostile("a", "/", FORM, holds=lambda value: value == 3), 200, answer("4"), WRONG),
        (Hostile("a", "/", FORM, holds=lambda value: value == 3), 200, answer("3"), "answered"),
    ],
)
def test_an_answer_to_a_hostile_request_is_judged(
    hostile_request: Hostile, status: int, answer: dict[str, Any], outcome: str
) -> None:
    assert hostile.request_outcome(hostile_request, status, answer)[0] == outcome


def test_a_hostile_run_is_judged(tmp_path: Path) -> None:
    harmless = {"status": 0, "seconds": 0.1, "mib": 9.0, "text": "ok"}
    inspect = Command("a", ["inspect", "m"])
    assert hostile.command_outcome(inspect, harmless)[0] == hostile.ANSWERED
    assert hostile.command_outcome(inspect, harmless | {"status": None})[0] == WRONG
    assert hostile.command_outcome(inspect, harmless | {"status": 1, "text": ""})[0] == WRONG
    assert hostile.command_outcome(inspect, harmless | {"status": 1})[0] == hostile.REFUSED
    assert hostile.command_outcome(inspect._replace(must_fail=True), harmless)[0] == WRONG
    (tmp_path / "extra.json").write_text(hostile_folders.SECRET)
    copy = Command("a", ["quantize", "m", str(tmp_path)])
    assert hostile.command_outcome(copy, harmless) == (WRONG, "extra.json is the user's own file")


def test_there_are_enough_hostile_inputs() -> None:
    requests = [*hostile_requests.all_requests()]
    patterns = [*hostile_folders.patterns()]
    links = len(hostile_folders.LINKS) * len(hostile_folders.SIDE_FILES)
    total = len(requests) + len(patterns) * len(hostile_folders.PLACES) + links
    assert total >= 1000
    assert all(
        isinstance(request.body, bytes) or json.dumps(request.body) for _, request in requests
    )
    assert len({request.name for _, request in requests}) > len(requests) * 0.9


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess

    code = (
        "import os, time\n"
        "from benchmarks.suites.hostile_worker import wait\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.setpgid(0, 0)\n"
        "    time.sleep(60)\n"
        "print(wait(child, 0.3)[0])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert ran.stdout == "None\n"
    assert hostile_worker.FILE_BYTES < 1 << 30


def test_tests_of_others_are_counted(tmp_path: Path) -> None:
    cases = '<testcase classname="unit.test_a" name="x"/>'
    cases += '<testcase classname="unit.test_a" name="y"><skipped message="own"/></testcase>'
    cases += '<testcase classname="unit.test_a" name="z"><failure message="m"/></testcase>'
    cases += '<testcase classname="unit.test_a" name="z[1]"><error message="m"/></testcase>'
    (tmp_path / "found.xml").write_text(f"<testsuite>{cases}</testsuite>")
    report = Report("s", "made")
    count_junit(report, tmp_path / "found.xml", {"a::z[[]*": "why"})
    assert report.rows["a"] == {"passed": 1, "not applicable": 2, WRONG: 1}
    assert report.reasons == {"a::y": "own", "a::z[1]": "why"}


def test_assertions_about_another_model_are_dropped() -> None:
    source = "def test():\n    assert a == n_prompt\n    assert b == 1\n"
    left = server_tests.without_model(source)
    assert "n_prompt" not in left and "assert b == 1" in left


def test_a_suite_without_its_package_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier outcomes stay, a wrong one is the exit status, and the tables show both."""
    out = tmp_path / "suites.json"

    def run_with(outcome: str) -> Any:
        report = Report("s", "made")
        report.add("row", outcome, "why")
        return lambda options: report

    monkeypatch.setattr(
        suites,
        "SUITES",
        {"schemas": ("llama", run_with("held")), "hostile-requests": ("", run_with(WRONG))},
    )
    arguments = ["--out", str(out), "--only"]
    assert suites.main([*arguments, "schemas"]) == 0
    assert "left out without --llama" in capsys.readouterr().out
    assert suites.main([*arguments, "schemas", "--llama", "x"]) == 0
    assert suites.main([*arguments, "hostile-requests"]) == 1
    result = json.loads(out.read_text())
    assert "| hostile requests | 1 |  | 1 |" in tables.suites(result)
    assert "| `row` | 1 | 0 |" in str(tables.suite_schemas(result))

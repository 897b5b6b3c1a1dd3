"""`spd verify URL` against servers that are truthful, lie, do not repeat themselves, or are hostile."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from spd.cli.commands.verify_server import parse_toggle
from spd.errors import UsageError
from spd.runtime.lab import api_client
from spd.runtime.lab.server_check import chance_of_modes
from tests.cli.conftest import ROOT, Run, RunResult, assert_refused
from tests.cli.fake_api_server import TOGGLE, FakeServer, digest, send, send_json, serving

Body = dict[str, Any]


def lie_in_500(server: FakeServer, body: Body, words: list[str]) -> list[str]:
    """Change one word in 500 where speculation is on."""
    prompt = body["messages"][0]["content"]
    numbers = [digest("lie", prompt, body["seed"], number) for number in range(len(words))]
    return [
        " lie" if body["draft"] and number % 500 == 0 else word
        for number, word in zip(numbers, words, strict=True)
    ]


def forget(server: FakeServer, body: Body, words: list[str]) -> list[str]:
    """Change the last word of half the replies, whatever was asked."""
    return [*words[:-1], f" {digest(len(server.bodies)) % 2}"]


def forget_drafting(server: FakeServer, body: Body, words: list[str]) -> list[str]:
    """Change the last word of each reply where speculation is on."""
    return [*words[:-1], f" {len(server.bodies)}"] if body["draft"] else words


def lie_later(server: FakeServer, body: Body, words: list[str]) -> list[str]:
    """Change a word where speculation is on, behind the 40 requests that come one at a time."""
    is_lie = body["draft"] and len(server.bodies) > 40
    return [*words[:3], " lie", *words[4:]] if is_lie else words


@pytest.fixture
def verify(spd_run: Run) -> Callable[..., RunResult]:
    """Return a function that runs `verify` against a server of its own."""

    def run(fake: FakeServer, *argv: object) -> RunResult:
        with serving(fake):
            return spd_run("verify", fake.url, "--toggle", TOGGLE, argv)

    return run


def settings_of(ran: RunResult) -> dict[tuple[float, int], dict[str, Any]]:
    """Return the settings of a certificate by temperature and requests at a time."""
    return {(each["temperature"], each["concurrency"]): each for each in ran.json["settings"]}


def test_a_truthful_server_passes(verify) -> None:
    fake = FakeServer()
    ran = verify(fake, "--json", "-n", 16)
    assert ran.code == 0 and ran.err == "", ran
    assert ran.json["passed"] and ran.json["differences"] == []
    assert set(settings_of(ran)) == {(0, 1), (0.8, 1), (0, 4), (0.8, 4)}
    for setting in ran.json["settings"]:
        assert setting["off_on"] == {"differing": 0, "pairs": 40} and setting["fresh"] is None
        assert setting["off_off"] == setting["on_on"] == {"differing": 0, "pairs": 10}
    assert ran.json["drafts"] == {"drafted": 80 * 8, "accepted": 80 * 5}
    assert (ran.json["tokens"], ran.json["different_tokens"]) == (4 * 160, 3 * 160)
    assert ran.json["chance_missed"] == pytest.approx((1 - 1 / 500) ** 480)
    assert 1 < fake.most_running <= 4
    asked = Counter((b["temperature"], b["seed"], b["draft"]) for b in fake.bodies)
    assert len(asked) == 2 * (10 + 20) and set(asked.values()) == {2, 4}
    assert {body["model"] for body in fake.bodies} == {"tiny"}
    orders = {
        seed: tuple(b["draft"] for b in fake.bodies if b["seed"] == seed) for _, seed, _ in asked
    }
    assert len({*orders.values()}) > 10, "the modes come in shuffled order"


def test_one_changed_token_in_500_is_found_and_blamed_on_speculation(verify) -> None:
    """The server's lies are a hash's, so the outcome is always the same."""
    lying = FakeServer(lie_in_500)
    ran = verify(lying, "--json", "-n", 125, "--tokens", 5000)
    assert ran.code == 6 and "speculation changes the text" in ran.err, ran
    assert ran.json["different_tokens"] >= 5000 and ran.json["chance_missed"] < 5e-5
    blamed = [s for s in ran.json["settings"] if s["verdict"] == "speculation"]
    assert blamed and all(setting["fresh"]["chance"] <= 0.001 for setting in blamed)
    assert {s["verdict"] for s in ran.json["settings"]} <= {"speculation", "equal"}
    for difference in ran.json["differences"]:
        assert difference["found"].startswith("lie")
        assert difference["expected"].startswith("w")
        assert difference["before"].endswith(" ")
        assert difference["margin"] == pytest.approx(0.25)
        assert 0 <= difference["token"] < 125 <= difference["position"] + 125


def test_a_server_that_does_not_repeat_itself_is_told_from_a_lying_one(verify) -> None:
    """Requests come one at a time, so the outcome is always the same."""
    arguments = ("--json", "-n", 4, "--temperature", 0, "--concurrency", 1)
    for change in (forget, forget_drafting):
        ran = verify(FakeServer(change), *arguments)
        assert ran.code == 6 and "the server does not repeat itself" in ran.err, ran
        (setting,) = ran.json["settings"]
        assert setting["verdict"] == "unrepeatable" and setting["changed"] > 0
        assert (setting["off_off"]["differing"] > 0) == (change is forget)
        assert setting["on_on"]["differing"] > 0


def test_a_server_that_lies_in_company_alone_is_seen(verify) -> None:
    ran = verify(FakeServer(lie_later, drafts=None), "-n", 8, "--temperature", 0)
    assert ran.code == 6 and "T 0, 4 at once: 10 of 10 texts" in ran.err, ran
    assert re.search(r"T 0, alone +texts changed 0 of 10", ran.text), ran.text
    assert "drafts            the server reports none" in ran.text
    assert "found lie w" in ran.text and "token 3" in ran.text and "margin 0.25" in ran.text


def count_drafts(server: FakeServer) -> bytes:
    """Return counters as vLLM has them, begun by other requests: of two models, and of times."""
    number = sum(body["draft"] for body in server.bodies)
    return b"""# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} %d.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="tiny"} 1e+02
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="tiny"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} %d.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="tiny"} NaN
""" % (1000 + 8 * number, 500 + 5 * number)


@pytest.mark.parametrize("drafts", [None, (4, 1)])
def test_drafts_are_those_of_replies_or_of_the_servers_counters(verify, drafts: Any) -> None:
    fake = FakeServer(drafts=drafts, counters=count_drafts)
    ran = verify(fake, "-n", 8, "--temperature", 0, "--concurrency", 1, "--json")
    expected = drafts or (8, 5)
    number = len(fake.bodies) // 2
    assert number and ran.code == 0, ran
    assert ran.json["drafts"] == {
        "drafted": number * expected[0],
        "accepted": number * expected[1],
    }


def test_two_servers_are_compared(spd_run) -> None:
    """The model's name may be given, and the key comes from the environment."""
    with serving(FakeServer()) as off, serving(FakeServer(models=["a", "b"])) as on:
        ran = spd_run("verify", on.url, "--against", off.url, "-n", 4)
        assert_refused(ran, 2, "serves 2 models", "it serves: a, b", "fix: --model NAME")
        on.change = lambda server, body, words: [" other", *words]
        ran = spd_run(
            ("verify", on.url, "--model", "b", "--against", f"{off.url}/v1/", "-n", 4, "--json")
        )
        assert ran.code == 6 and ran.json["against"] == f"{off.url}/v1", ran
        assert {body["model"] for body in on.bodies + off.bodies} == {"b"}
        assert len(on.bodies) > 80 and len(off.bodies) > 80
        off.change = lambda server, body, words: [*words, str(on.running)]
        on.change = lambda server, body, words: [*words, str(off.running)]
        ran = spd_run("verify", on.url, "--model", "b", "--against", off.url, "--concurrency", 1)
        assert ran.code == 0, "alone means that the other server has nothing to do"


def test_a_toggle_that_a_server_passes_over_is_seen(spd_run) -> None:
    always = FakeServer()
    always.reply = lambda body: FakeServer.reply(always, {**body, "draft": True})  # type: ignore[method-assign]
    with serving(always):
        ran = spd_run("verify", always.url, "--toggle", "speculation=1/0", "-n", 4)
    assert_refused(ran, 4, "reports 8 draft tokens in a reply that is to have none")


TOGGLES: dict[str, tuple[Body, Body] | None] = {
    "draft=true/false": ({"draft": True}, {"draft": False}),
    "spec.kind=auto/off": ({"spec": {"kind": "auto"}}, {"spec": {"kind": "off"}}),
    '"spec.n_max"=16/0': ({"spec.n_max": 16}, {"spec.n_max": 0}),
    's={"a":"x/y"}/null': ({"s": {"a": "x/y"}}, {"s": None}),
    "draft": None,
    "draft=true": None,
    "=1/0": None,
    "a..b=1/0": None,
    "a=x/y/z": None,
}


@pytest.mark.parametrize(("text", "fields"), TOGGLES.items())
def test_a_toggle_is_a_field_with_two_values(text: str, fields: tuple[Body, Body] | None) -> None:
    if fields is None:
        with pytest.raises(UsageError, match="is not FIELD=ON/OFF"):
            parse_toggle(text)
    else:
        assert parse_toggle(text) == fields


def test_the_permutation_test_is_exact() -> None:
    """A chance of `a` or less has at most a share `a` of all divisions of the same replies."""
    replies = "aaabbcdd"
    chances = [
        chance_of_modes(
            [([replies[n] for n in off], [replies[n] for n in range(8) if n not in off])]
        )
        for off in itertools.combinations(range(8), 4)
    ]
    for level in {*chances}:
        assert sum(chance <= level for chance in chances) / len(chances) <= level + 1e-12
    clean = ["x"] * 7, ["y"] * 7
    assert chance_of_modes([clean]) == pytest.approx(2 / 3432)
    assert chance_of_modes([clean, clean]) == pytest.approx((2 / 3432) ** 2)
    assert chance_of_modes([(["x", "y"], ["x", "y"])]) == 1 == chance_of_modes([])


def cut(handler: BaseHTTPRequestHandler) -> None:
    send(handler, b'{"choices": [', Content_Length=1000)
    handler.close_connection = True


def cut_chunk(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b'5\r\n{"cho\r\n')
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Send a byte at a time, each of them in time."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(1000):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.02)


def flood(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**16)


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


def speak_otherwise(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"220 mail.example.org ESMTP\r\n")
    handler.close_connection = True


def answering(data: bytes, status: int = 200, **headers: object) -> Any:
    """Return a function that sends such an answer."""
    return lambda handler: send(handler, data, status, **headers)


EVIL = "\x1b]0;own\x07no\nerror: such\u202e model" + "n" * 10_000
HOSTILE: dict[str, tuple[Any, int, tuple[str, ...]]] = {
    "no JSON": (answering(b"<html>hi"), 4, ("the answer is no JSON", "<html>hi")),
    "a list": (answering(b"[]"), 4, ("is no JSON object",)),
    "deep": (answering(b"[" * 100_000), 4, ("is no JSON",)),
    "stream": (answering(b"data: {}\n\n"), 4, ("is no JSON", "data: {}")),
    "no choices": (answering(b'{"choices": []}'), 4, ("has no `choices` with a `message`",)),
    "odd choices": (answering(b'{"choices": {"0": 1}}'), 4, ("has no `choices`",)),
    "odd message": (answering(b'{"choices": [{"message": 7}]}'), 4, ("has no `choices`",)),
    "half": (cut, 8, ("ended before it was whole",)),
    "half a stream": (cut_chunk, 8, ("ended before it was whole",)),
    "drip": (drip, 8, ("no whole reply within 0.3 s", "a smaller -n")),
    "flood": (flood, 8, ("larger than 1 MiB",)),
    "hang up": (hang_up, 8, ("without response",)),
    "other protocol": (speak_otherwise, 8, ("220 mail",)),
    "redirect": (
        answering(b"", 307, Location="http://other.example/v1"),
        8,
        ("redirects to http://other.example/v1, which is not followed",),
    ),
    "unauthorized": (answering(b"no", 401), 8, ("wants another key (401)", "SPD_API_KEY")),
    "not there": (answering(b"", 404), 3, ("is not there (404)", "--model")),
    "refused": (answering(b'{"detail": "top_k?"}', 422), 4, ("(422)", "top_k?", "--toggle")),
    "busy": (answering(b"", 429, Retry_After=0), 8, ("stayed busy (429), asked 6 times",)),
    "failed": (answering(b'{"error": {"message": "CUDA"}}', 500), 8, ("failed (500)", "CUDA")),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_answer_is_refused_in_a_line(
    case: str, verify: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, code, texts = HOSTILE[case]
    monkeypatch.setattr(api_client, "REPLY_SECONDS", 0.3 if case == "drip" else 30)
    monkeypatch.setattr(api_client, "MAX_REPLY_BYTES", 2**20)
    start = time.monotonic()
    ran = verify(FakeServer(answer=answer), "-n", 4)
    assert time.monotonic() - start < 20
    assert_refused(ran, code, "http://127.0.0.1:", *texts)
    assert len(ran.err.splitlines()) <= 4


def test_what_a_server_says_steers_no_terminal(verify) -> None:
    refuse = FakeServer(
        answer=lambda handler: send_json(handler, {"error": {"message": EVIL}}, 400)
    )
    ran = verify(refuse, "-n", 4)
    assert_refused(ran, 4, "\\x1b]0;own")
    assert "\nerror: such" not in ran.err and "\u202e" not in ran.err and len(ran.err) < 1000
    ran = verify(FakeServer(lambda *_: [EVIL], models=[EVIL]), "-n", 4, "--temperature", 0)
    assert ran.code == 0 and "\x1b" not in ran.text
    half = FakeServer(lambda server, body, words: [f"{chr(0xD800 + body['draft'])}"])
    ran = verify(half, "-n", 4, "--json", "--temperature", 0)
    assert ran.code == 6 and ran.json["differences"][0]["found"].endswith("1")


def test_odd_figures_are_no_figures(verify) -> None:
    """Counts of another type or below 0 are left out, and odd log-probabilities."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        choice = {"message": {"content": None, "reasoning": ["x"]}, "logprobs": {"content": [1]}}
        usage = {"completion_tokens": -4, "completion_tokens_details": 3}
        send_json(handler, {"choices": [choice], "usage": usage, "timings": {"draft_n": "many"}})

    ran = verify(FakeServer(answer=answer), "-n", 4, "--json")
    assert ran.code == 0 and (ran.json["tokens"], ran.json["drafts"]) == (0, None)
    assert ran.json["chance_missed"] == 1


def test_a_margin_needs_the_same_reply_again(verify) -> None:
    def change(server: FakeServer, body: Body, words: list[str]) -> list[str]:
        is_other = "logprobs" in body and body["draft"]
        return [" odd"] if is_other else [" lie", *words[1:]] if body["draft"] else words

    ran = verify(FakeServer(change), "-n", 4, "--json", "--temperature", 0, "--concurrency", 1)
    assert ran.code == 6 and len(ran.json["differences"]) == 10
    assert {each["token"] for each in ran.json["differences"]} == {None}


def test_another_end_is_a_difference(verify) -> None:
    fake = FakeServer()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        reply = FakeServer.reply(fake, fake.bodies[-1])
        reply["choices"][0]["finish_reason"] = "stop" if "timings" in reply else "length"
        send_json(handler, reply)

    fake.answer = answer
    ran = verify(fake, "-n", 4, "--json", "--temperature", 0, "--concurrency", 1)
    assert ran.code == 6 and len(ran.json["differences"]) == 10
    difference = ran.json["differences"][0]
    assert (difference["expected"], difference["found"]) == ("length", "stop")
    assert difference["position"] >= 8 and difference["token"] is None


def test_a_busy_server_is_asked_again(verify) -> None:
    fake = FakeServer()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        busy = len(fake.bodies) % 10 == 1
        answer = {"error": "busy"} if busy else FakeServer.reply(fake, fake.bodies[-1])
        if busy:
            send(handler, b"", 503, Retry_After=0)
        else:
            send_json(handler, answer)

    fake.answer = answer
    ran = verify(fake, "-n", 4, "--temperature", 0, "--concurrency", 1)
    assert ran.code == 0 and len(fake.bodies) == 45


def test_addresses_and_options_are_checked(spd_run: Run, model: object) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        ran = spd_run("verify", url, "--toggle", TOGGLE)
        assert_refused(ran, 8, f"cannot connect to {url}/v1", "start the server")
    for wrong in (
        "http://",
        "http://h:99999",
        "http://me:pw@h/v1",
        "http://h/v1?key=1",
        "http://ä",
    ):
        assert_refused(spd_run("verify", wrong, "--toggle", TOGGLE), 2, "is no address")
    ran = spd_run("verify", "http://h")
    assert_refused(ran, 2, "--toggle and --against has to say", "speculative.spec=auto/off")
    assert_refused(spd_run("verify", "http://h", "--against", "lag=0"), 2, "is no address")
    assert_refused(spd_run("verify", "http://h", "--spec", "mtp"), 2, "--spec is about a model")
    assert_refused(spd_run("verify", model, "--toggle", TOGGLE), 2, "--toggle is about a server")
    ran = spd_run("verify", "http://h", "--toggle", TOGGLE, "--api-key", "a\nb")
    assert_refused(ran, 2, "--api-key holds characters")


def test_a_key_is_sent(verify, monkeypatch) -> None:
    arguments = ("-n", 4, "--temperature", 0, "--concurrency", 1)
    assert verify(FakeServer(key="k"), *arguments, "--api-key", "k").code == 0
    assert_refused(verify(FakeServer(key="k"), *arguments), 8, "another key (401)", "no such key")
    monkeypatch.setenv("SPD_API_KEY", "k")
    assert verify(FakeServer(key="k"), *arguments).code == 0


def test_an_interrupt_prints_what_was_found_and_torch_is_not_imported(tmp_path) -> None:
    """The process says on standard error, as it ends, whether torch was imported."""
    code = (
        "import sys, signal; from spd.cli import app, signals; import spd.cli.app as app\n"
        "app.exit_by_signal = lambda n: print('torch' in sys.modules, file=sys.stderr) or n\n"
        "sys.exit(app.main(sys.argv[1:]))"
    )

    def slow(server: FakeServer, body: Body, words: list[str]) -> list[str]:
        time.sleep(0.01)
        return [" lie", *words[1:]] if body["draft"] else words

    with serving(FakeServer(slow)) as fake:
        options = ["--toggle", TOGGLE, "--json", "--tokens", "100000"]
        process = subprocess.Popen(
            [sys.executable, "-c", code, "verify", fake.url, *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while len(fake.bodies) < 100:
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert err.decode().splitlines() == ["stopping…", "False"]
    result = RunResult(process.returncode, out, "").json
    assert result["interrupted"] and not result["passed"]
    assert result["settings"][0]["changed"] > 0 and len(result["differences"]) == 10
    assert result["differences"][0]["found"].startswith("lie")

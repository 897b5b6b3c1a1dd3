"""`spd generate` and `spd chat` through a server print what they print alone; servers start and
stop."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from spd.conversation.tools.call_check import UNKNOWN_FORM_NOTE
from spd.errors import UsageError
from spd.formats.demo import demo_folder
from spd.server.run import open_listener
from tests.cli.cli_processes import run_on_terminal
from tests.cli.conftest import command_words, wait_until
from tests.server.conftest import MESSAGES, QUESTION, TEMPLATE

pytestmark = pytest.mark.usefixtures("keep_threads")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a runtime folder of one's own."""
    return tmp_path_factory.mktemp("runtime")


def begin(home: Path, *words: str | Sequence[str], code: str = "") -> subprocess.Popen[str]:
    """Begin spd, or code around it, whose server or client has its sockets there."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(home), "SPD_CONFIG": os.devnull}
    command = [sys.executable, *(("-c", code) if code else ("-m", "spd"))]
    return subprocess.Popen(
        [*command, *map(str, command_words(words))],
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def spd(
    home: Path, *words: str | Sequence[str], stdin: str = "", code: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run spd on some input to its end."""
    arguments = [str(word) for word in command_words(words)]
    process = begin(home, arguments, code=code)
    out, err = process.communicate(stdin, timeout=120)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def start(home: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    """Return a server that is ready, and its port."""
    process = begin(home, "serve", "--port", "0", "--threads", "1", words)
    match = re.search(r":(\d+)/v1", process.stderr.readline())
    assert match
    wait_until((home / "spd" / f"{process.pid}.sock").exists)
    return process, int(match[1])


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[int]:
    """Yield a server of the demo in a process of its own; its port."""
    process, port = start(home, "--alias", "small", "--alias", "*")
    yield port
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not list((home / "spd").glob("*.sock"))


def test_a_star_as_alias_lets_clients_name_any_model(server: int) -> None:
    """Its replies have the model's name, and the list of models the names that were given."""
    url = f"http://127.0.0.1:{server}/v1"
    for name in ("demo", "small", "gpt-4o", "*"):
        body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["model"] == "demo"
    with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
        assert [card["id"] for card in json.load(answer)["data"]] == ["demo", "small"]


NOT_WARM = {"tokenizers", "spd.formats.model_config", "importlib.metadata", "secrets"}
NOT_WARM |= {"hashlib", "logging", "spd.cli.terminal.bars", "typer", "subprocess"}
NOT_WARM |= {"difflib", "traceback", "spd.formats.stores", "spd.formats.gguf.file_sets"}
NOT_WARM |= {f"spd.conversation.{name}" for name in ("fill_in", "logprobs", "vocabulary")}
NOT_WARM |= {"spd.conversation.settings", "spd.runtime.engine.trace", "spd.cli.typer_app"}
"""What a prompt that a server answers does without: each takes milliseconds of the time to its
first byte."""
COMMANDS: list[list[str]] = [
    ["--temperature", "0", "-n", "20", QUESTION],
    ["--temperature", "0.8", "--seed", "5", "-n", "60", "-s", "Be terse", QUESTION],
    ["--raw", "--seed", "1", "-n", "12", "def read("],
    ["--prompt-ids", "460,854,10", "-n", "6", "--temperature", "0"],
    ["--stop", "path", "--temperature", "0", "-n", "40", QUESTION],
    ["--schema", '{"type": "boolean"}', "--seed", "1", "-n", "20", QUESTION],
    ["--json", "--logprobs", "2", "--seed", "3", "--temperature", "1", "-n", "9", QUESTION],
    ["--json", "--set", "top_k=5", "--seed", "3", "--temperature", "1", "-n", "9", QUESTION],
    ["--temperature", "900", QUESTION],
    ["--think", "5", QUESTION],
    ["--json", "--logprobs", "99", "a"],
    ["--schema", '{"type": "flower"}', QUESTION],
    [
        "--schema",
        '{"type": "string", "minLength": 90}',
        "--temperature",
        "0",
        "-n",
        "6",
        QUESTION,
    ],
    ["-n", "4000", "--temperature", "0", "word " * 4050],
    ["word " * 9000],
    [],
]


@pytest.mark.covers(count=5)
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_server_gives_the_same_bytes_and_status(
    home: Path, server: int, number: int, spd_run: Any
) -> None:
    words = ["generate", "--threads", "1", *COMMANDS[number]]
    warm = spd(home, words)
    alone = spd_run(words, "--no-server", stdin=b"")
    assert (warm.returncode, warm.stderr) == (alone.code, alone.err)
    if "--json" in words and not alone.code:
        assert timeless(json.loads(warm.stdout)) == timeless(alone.json)
    else:
        assert warm.stdout == alone.text


def timeless(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply without times, and without what follows from them: how many drafts there
    were.
    """
    for name in ("timings", "metrics"):
        reply[name] = sorted(reply.get(name, ()))
    reply.get("plan", {}).pop("memory_budget_bytes", None)
    return reply


ODD = {"temperature": 0.9, "logprobs": 1, "stop": "path", "logit_bias": {"5": 1}}
LINES: list[dict[str, Any]] = [
    {"prompt": QUESTION, "params": ODD},
    {"messages": [{"role": "user", "content": "What does len do?"}], "id": "b"},
    *({"prompt": "Is it?", "params": {"schema": {"type": kind}}} for kind in ("boolean", "flower")),
    {"prompt_ids": [1, 999999]},
    {"promt": 3},
    {"prompt": "word " * 5000},
]
SAID = f"{QUESTION}\nAnd len?\n/undo\n/regen\n/set temperature=0\nWhat is a list?\n/spec off\n{QUESTION}\n"


def test_lines_are_answered_alike(home: Path, server: int, spd_run: Any) -> None:
    """Lines that are refused get the same error, too."""
    lines = "".join(json.dumps(line) + "\n" for line in LINES)
    words = ["generate", "--jsonl", "--threads", "1", "-n", "24", "--seed", "4", "-v"]
    warm = spd(home, words, stdin=lines)
    alone = spd_run(words, "--no-server", stdin=lines.encode())
    assert f"server  http://127.0.0.1:{server}/v1" in warm.stderr and "server" not in alone.err
    assert warm.returncode == alone.code == 7
    warm_lines, alone_lines = (
        [timeless(json.loads(line)) for line in output.splitlines()]
        for output in (warm.stdout, alone.text)
    )
    assert warm_lines == alone_lines and len(warm_lines) == len(LINES)


def test_a_chat_goes_on_alike(home: Path, server: int, spd_run: Any) -> None:
    """Turns are taken back and asked again; another engine is loaded here."""
    words = ["chat", "--no-save", "--threads", "1", "-n", "16", "--seed", "4", "-v"]
    warm = spd(home, words, stdin=SAID)
    alone = spd_run(words, "--no-server", stdin=SAID.encode())
    assert (warm.returncode, warm.stdout) == (alone.code, alone.text) and warm.stdout.count(
        "\n"
    ) >= 5
    assert f"server  http://127.0.0.1:{server}/v1" in warm.stderr and "server" not in alone.err
    assert "not used: another spec" in warm.stderr


@pytest.mark.parametrize(
    "words", [["generate", QUESTION], ["generate", "--jsonl"], ["chat", "--no-save"]]
)
def test_it_says_so_and_imports_no_torch(home: Path, server: int, words: list[str]) -> None:
    unused = {"torch", "starlette"} | (NOT_WARM if QUESTION in words else set())
    code = (
        "import sys; from spd.cli.app import main\n"
        f"try: main([*{words!r}, '-v', '-n', '3', '--threads', '1'])\n"
        f"finally: print({unused} & set(sys.modules), file=sys.stderr)"
    )
    ran = spd(home, stdin='{"prompt": "a"}', code=code)
    assert f"server  http://127.0.0.1:{server}/v1" in ran.stderr
    assert ran.stderr.rstrip().endswith("set()")


@pytest.mark.parametrize("words", [["--json", QUESTION], ["--jsonl"]])
def test_ctrl_c_ends_the_request_and_keeps_what_came(
    home: Path, server: int, words: list[str]
) -> None:
    process = begin(home, "generate", "--threads", "1", "--set=ignore_eos=on", "-n", "4000", words)
    process.stdin.write('{"prompt": "a"}')
    process.stdin.close()
    process.stdin = None
    wait_until(lambda: health(server)["running"] > 0)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    if "--json" in words:
        reply = json.loads(out)
        assert reply["finish_reason"] == "abort" and reply["text"]
    else:
        assert out == "" and "stopped after 0 of 1 lines" in err
    wait_until(lambda: health(server)["running"] == 0)


def health(port: int) -> dict[str, Any]:
    """Return a server's answer to /health."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        return json.load(answer)


def test_status_another_engine_and_a_drafter_that_is_not_there(home, server, monkeypatch) -> None:
    ran = spd(home, "serve", "--status")
    assert ran.returncode == 0
    assert ran.stdout.startswith(f"demo · http://127.0.0.1:{server}/v1 · pid ")
    status, text = run_on_terminal("serve", "--status", columns=40, XDG_RUNTIME_DIR=str(home))
    assert status == 0 and max(map(len, text.splitlines())) < 40
    assert spd(home, "serve", "--status", "demo-hybrid").returncode == 3
    (server_info,) = json.loads(spd(home, "serve", "--status", "--json").stdout)["servers"]
    assert {"model", "url", "pid", "spec", "ctx", "slots", "running"} <= server_info.keys()
    ran = spd(home, "serve", "--json")
    assert ran.returncode == 2 and "--json is for --status" in ran.stdout
    ran = spd(home, "serve", "--port", server)
    assert ran.returncode == 2 and "spd serves demo there (pid " in ran.stderr
    assert "fix: spd serve --stop" in ran.stderr
    words = ["--spec", "off", "--ctx", "512", "--dtype", "float32"]
    ran = spd(home, "generate", "-v", "--threads", "1", "-n", "2", words, QUESTION)
    assert ran.returncode == 0 and "not used: another dtype, spec, ctx" in ran.stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert spd(home, "generate", "--draft-model", "org/none", QUESTION).returncode == 3


def test_a_port_that_is_taken_is_refused() -> None:
    with (
        open_listener("127.0.0.1", 0) as first,
        pytest.raises(UsageError, match="Address already in use"),
    ):
        open_listener("127.0.0.1", first.getsockname()[1])


def test_a_folder_that_is_not_ones_own_alone_is_refused(tmp_path: Path) -> None:
    """Others can reach it, or it belongs to another user."""
    (tmp_path / "spd").mkdir(mode=0o755)
    (tmp_path / "spd" / "x.sock").touch()
    commands = (["generate", QUESTION], ["serve", "--port", "0"], ["serve", "--status"])
    ran = [spd(tmp_path, words) for words in commands]
    if os.geteuid() == 0:  # only root can give a folder away
        (tmp_path / "spd").chmod(0o700)
        os.chown(tmp_path / "spd", 65534, -1)
        ran.append(spd(tmp_path, "generate", QUESTION))
    assert all(
        process.returncode == 5 and "not a folder of yours alone" in process.stderr
        for process in ran
    )


def test_a_chat_is_told_that_its_server_has_ended(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    chat = begin(tmp_path, "chat", "--no-save", "--threads", "1", "-n", "3")
    chat.stdin.write(f"{QUESTION}\n")
    chat.stdin.flush()
    assert chat.stdout.readline().strip()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    _, err = chat.communicate(f"{QUESTION}\n", timeout=60)
    assert chat.returncode == 9 and "the server has ended" in err


def test_a_killed_server_stops_no_other_and_stop_lets_replies_end(tmp_path: Path) -> None:
    process, port = start(tmp_path)
    process.kill()
    process.wait(10)
    process, _ = start(tmp_path, "--port", str(port))
    assert spd(tmp_path, "serve", "--status").stdout.count("\n") == 1
    assert len(list((tmp_path / "spd").glob("*.sock"))) == 1
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": MESSAGES, "max_tokens": 700, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    response = connection.getresponse()
    response.readline()
    assert spd(tmp_path, "serve", "--stop").returncode == 0
    remaining_stream = response.read().decode()
    assert '"finish_reason":"length"' in remaining_stream and remaining_stream.endswith(
        "data: [DONE]\n\n"
    )
    assert process.wait(30) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2)


def test_a_server_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    process, _ = start(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        ran = spd(tmp_path, "generate", "--threads", "1", "-n", "2", "--temperature", "0", QUESTION)
        assert ran.returncode == 0 and ran.stdout.startswith("Join")
        assert f"the server of process {process.pid} does not answer" in ran.stderr
    finally:
        process.kill()
        process.wait(10)


def test_a_detached_server_ends_after_idle_time(tmp_path: Path) -> None:
    ran = spd(tmp_path, "serve", "--detach", "--idle", "1s", "--port", "0", "--threads", "1")
    assert ran.returncode == 0
    address_line, process_line = ran.stderr.splitlines()
    assert address_line.startswith("serving demo at http://127.0.0.1:") and process_line.startswith(
        "pid "
    )
    wait_until(lambda: not list((tmp_path / "spd").iterdir()))  # neither socket nor log stays
    assert spd(tmp_path, "serve", "--stop").returncode == 3
    serve = ["serve", "./none", "--port", "0"]
    refused, detached = (spd(tmp_path, serve, words) for words in ([], ["--detach"]))
    assert refused.returncode == 3 and (detached.returncode, detached.stderr) == (3, refused.stderr)
    assert not list((tmp_path / "spd").iterdir())


@pytest.mark.slow
def test_a_form_of_calls_that_is_not_known_is_noted(tmp_path: Path) -> None:
    """Once, when the server begins."""
    model = tmp_path / "model"
    shutil.copytree(demo_folder(), model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE.replace("<tool_call>", "<call>")
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    process = begin(tmp_path, "serve", str(model), "--port", "0", "--threads", "1")
    wait_until((tmp_path / "spd" / f"{process.pid}.sock").exists)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=30)
    lines = stderr.splitlines()
    assert process.returncode == 0 and lines[0].startswith("serving ")
    assert lines[1] == f"note: {UNKNOWN_FORM_NOTE}" and stderr.count(UNKNOWN_FORM_NOTE) == 1

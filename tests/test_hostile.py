"""Hostile input to the command line: names that steer a terminal, irregular files, bombs."""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.hub_server import COMMIT, NAME, Hub, serve
from tests.recipes.tiny import write_tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
SECONDS = 60
GIB = 1 << 30
STATUSES = {0, 2, 3, 4, 5, 6, 7, 8, 9, 130, 141}
CONTROLS = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r(?!\n)|\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8e\x8f\xa8-\xae]"
    rb"|\xe2\x81[\xa6-\xa9]"
)
EVIL = [
    "\x1b]0;own\x07",
    "a\x1b[2J\x1b[31mb",
    "\x9b31m\x90q\x9c",
    "bell\x07\x08\x7f",
    "over\rwritten",
]
EVIL += [
    "half\ud800",
    "\u202egpj.exe\u2066\u200f\u061c",
    "nul\x00nul",
    "[bold]{0}%s" + "n" * 10_000,
]
EVIL += ["\u2028end\u2029\nerror: no\n  fix: rm"]
CANARIES = "json re enum typing torch numpy triton spd sitecustomize usercustomize jinja2 tokenizers socket"
SHAPES = (
    "fifo folder socket loop dangling /dev/zero /dev/full empty one cut cut flipped flipped zeros"
)
SHAPES += " deep twice list NaN huge kinds utf-16"
TABLES = {
    section.partition("]\n")[0]: section.partition("]\n")[2].strip().split("\n")
    for section in (ROOT / "tests/hostile_cases.txt").read_text(encoding="utf-8").split("\n\n[")[1:]
}
COMMANDS = TABLES["COMMANDS"]


class Case(NamedTuple):
    """A command line, and a change of a folder with a copy of a model before it."""

    kind: str
    line: str
    spoil: Callable[[Path], Any] = lambda place: None
    base: str = "tiny"
    stdin: str = "hi\n/model\n/stats\n/params\n/sessions\n"


def serve_cases() -> None:
    """Run each case from stdin in a fork of this process; report its status and peak memory."""
    import spd.runtime
    from spd.__main__ import main
    from spd.cli.app import main as run

    assert spd.runtime.Engine and run
    space = resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])
    for line in sys.stdin:
        case = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            os.chdir(case["cwd"])
            os.environ.update(case["env"])
            resource.setrlimit(resource.RLIMIT_AS, (space + 12 * GIB,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
            signal.alarm(3 * SECONDS)
            for number, name in enumerate(("in", "out", "err")):
                os.dup2(
                    os.open(case[name], (os.O_RDONLY, os.O_WRONLY | os.O_CREAT)[number > 0]), number
                )
            sys.argv = ["spd", *case["argv"]]
            sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
            status = 99
            with contextlib.suppress(BaseException):
                status = main()
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
        _, status, usage = os.wait4(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10]), flush=True)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = list[str]()
        self.count = 0
        self.floor = 0
        write_tiny(folder / "tiny", architecture="Qwen3ForCausalLM", tie=False)
        shutil.copytree(ROOT / "spd/formats/demo", folder / "demo")
        shutil.copytree(ROOT / "spd/formats/demo/eagle3", folder / "eagle3")
        private_environment = {
            "XDG_STATE_HOME": folder / "case/state",
            "XDG_CONFIG_HOME": folder / "none",
            "TMPDIR": folder,
            "HF_HUB_CACHE": folder / "hub",
            "HF_HUB_OFFLINE": 1,
            "COLUMNS": 100,
            "TERM": "dumb",
        }
        self.env = {**os.environ, **{key: str(value) for key, value in private_environment.items()}}
        command = [sys.executable, "-m", "spd", "convert-mtp", "demo", str(folder / "head"), "-q"]
        subprocess.run(command, cwd=ROOT, env=self.env, check=True, capture_output=True)
        words = [sys.executable, "-m", "tests.test_hostile"]
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(
            words, cwd=ROOT, env=self.env, stdin=pipe, stdout=pipe, text=True
        )

    def run(self, case: Case, **env: str) -> None:
        place = self.folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / case.base, place / "model")
        (place / "out").mkdir()
        case.spoil(place)
        files = {name: str(self.folder / name) for name in ("in", "out", "err")}
        for name in files.values():
            Path(name).write_text(
                case.stdin * name.endswith("in"), encoding="utf-8", errors="surrogatepass"
            )
        argv = case.line.replace("BASE", str(self.folder)).split(" ")
        assert self.server.stdin and self.server.stdout
        self.server.stdin.write(
            json.dumps({"argv": argv, "cwd": str(place), "env": env, **files}) + "\n"
        )
        self.server.stdin.flush()
        status, peak = json.loads(self.server.stdout.readline())
        out, err = (Path(files[name]).read_bytes() for name in ("out", "err"))
        self.count = self.count + 1
        self.floor = self.floor or peak
        allowed = STATUSES | ({1} if argv[0] == "doctor" else set())
        faults = [f"status {status}"] if status not in allowed else []
        faults += [f"peak {peak / GIB:.1f} GiB"] if peak > self.floor + 3 * GIB else []
        faults += ["traceback"] if b"Traceback (most" in err + out else []
        replies = argv[0] == "chat" or (argv[0] == "generate" and "--json" not in argv)
        for stream, data in (("stdout", b"" if replies else out), ("stderr", err)):
            if match := CONTROLS.search(data):
                faults.append(f"{stream}: {data[max(0, match.start() - 60) : match.end() + 30]!r}")
        if faults:
            last = err.decode(errors="replace").strip().rsplit("\n", 1)[-1][:300]
            self.faults.append(
                f"{case.kind}: spd {case.line[:300]!a}: {'; '.join(faults)}: {last!a}"
            )
            print(self.faults[-1])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Return the server; its first case is harmless, and others are compared with its peak memory."""
    shared_bench = Bench(tmp_path_factory.mktemp("hostile"))
    shared_bench.run(Case("floor", "generate -m model -n 2 hi"))
    assert not shared_bench.faults
    yield shared_bench
    shared_bench.server.kill()


def put(name: str, path: str, value: Any) -> Callable[[Path], Any]:
    """Return a change that sets a value deep inside a JSON file or the header of the weights."""

    def spoil(place: Path) -> None:
        file = place / "model" / name
        data = file.read_bytes() if file.exists() else b"{}"
        end = 0
        if name.endswith(".safetensors"):
            end = 8 + int.from_bytes(data[:8], "little")
        node = document = json.loads(data[8:end] if end else data)
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(" ")]
        for key in keys:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]
        if isinstance(last, str) and "EVIL" in last:
            added = (
                {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                if end and not keys
                else value
            )
            node[last.replace("EVIL", value)] = 7 if "vocab" in keys else added
        else:
            node[last] = value
        text = json.dumps(document).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:] if end else text)

    return spoil


def writes(name: str, text: str) -> Callable[[Path], Any]:
    return lambda place: (place / name).write_bytes(text.encode("utf-8", "surrogatepass"))


def strings(rng: random.Random, bench: Bench) -> Iterator[Case]:
    """Yield names and values that would steer a terminal, wherever a command may print them."""
    for line in TABLES["PLACES"]:
        name, paths = line.split(": ")
        for path, command in (
            (path, c) for path in paths.split("|") for c in rng.sample(COMMANDS, 6)
        ):
            evil = rng.choice(EVIL)
            base = rng.choice(("tiny", "tiny", "head", "eagle3"))
            yield Case(f"string as {path}", command, put(name, path, evil), base)
    for text, command in product(TABLES["TEMPLATES"], COMMANDS[:6]):
        template = text.replace("@", rng.choice(EVIL))
        yield Case("template", command, writes("model/chat_template.jinja", template))
    times = {"draft": 1, "verify": 2, "rest": 1, "host": 0}
    lists = {"draft": [1], "sampled": [1], "committed": [1], "ms": times}
    numbers = {"round": 1, "position": 9, "accepted": 0, "draft_forwards": 1, "k": 1}
    for evil, quoted in ((evil, json.dumps(evil)) for evil in EVIL):
        head = {"schema": "spd.trace/1", "temperature": 0, "model": evil}
        head |= {"plan": {"spec": evil, "verify": evil}}
        row = json.dumps({"request": evil, "method": evil, **lists, **numbers})
        additions: list[dict[str, object]] = [{"prompt_ids": []}, {"prompt_ids": evil}, {evil: 1}]
        for addition in additions:
            yield Case(
                "trace", "explain t -v", writes("t", f"{json.dumps(head | addition)}\n{row}\n{row}")
            )
        lines = "\n".join(
            ('{"id": @, "prompt": "hi"}', '{"id": 1, "prompt": @}', '{"id": 2, @: 3}', "@")
        )
        lines = lines.replace("@", quoted)
        for words in ("--json", "-q", "-v -o out/a.jsonl"):
            yield Case("jsonl", f"generate -m model -n 2 --jsonl {words} -f l", writes("l", lines))
        evil_entry = {evil: evil}
        result = {
            "schema": "spd.bench/1",
            "model": evil,
            "plans": [{"model": evil}],
            "settings": evil_entry,
        }
        result |= {
            "rows": [{"label": evil, "spec": evil}],
            "versions": evil_entry,
            "machine": {"cpu": evil},
        }
        yield Case("result", "compare a.json a.json", writes("a.json", json.dumps(result)))
        folder = re.sub(r"[\0/ ]", "", evil).replace("\ud800", "\udcff")[:200]
        yield Case("file name", rng.choice(COMMANDS), writes(f"model/{folder}.safetensors", "{"))
        for line in rng.sample(COMMANDS, 4):
            moved = lambda place, folder=folder: shutil.move(place / "model", place / folder)  # noqa: E731
            yield Case("folder name", re.sub(r"\bmodel\b", lambda _, f=folder: f, line), moved)  # type: ignore[misc]
        typed = f"/{evil}\n/load {evil}\n/set {evil}\n"
        yield Case("line of a chat", "chat model -n 2 --no-save", stdin=typed)
        cached = bench.folder / "hub" / f"models--org--{folder[:100]}" / "snapshots" / COMMIT
        shutil.copytree(bench.folder / "tiny", cached)
        (cached / "config.json").write_text(
            json.dumps({"model_type": evil, "architectures": [evil]})
        )
    for words in ("", " --json", " -v", " -q --color never"):
        yield from (Case("cache", "ls" + words), Case("doctor", "doctor --quick" + words))


def become(path: Path, shape: str, rng: random.Random) -> None:
    data = path.read_bytes() if path.is_file() else b'{"a": 1, "b": [2, "c"]}'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if shape == "fifo":
        os.mkfifo(path)
    elif shape == "folder":
        path.mkdir()
    elif shape == "socket":
        with socket.socket(socket.AF_UNIX) as server_socket:
            server_socket.bind(
                f"/proc/self/fd/{(folder := os.open(path.parent, os.O_RDONLY))}/{path.name}"
            )
        os.close(folder)
    elif shape in ("loop", "dangling") or shape.startswith("/dev"):
        path.symlink_to({"loop": path.name, "dangling": "nothing"}.get(shape, shape))
    elif shape == "zeros":
        with path.open("wb") as file:
            file.truncate(64 << 20)
    else:
        at = rng.randrange(min(len(data), 4000))
        fixed = {
            "empty": b"",
            "one": b"{",
            "cut": data[:at],
            "deep": b'{"a":' * 100_000 + b"[" * 100_000,
        }
        fixed["flipped"] = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        fixed |= {
            "twice": b'{"a": 1, "a": 2}',
            "list": b"[[[1]]]",
            "NaN": data.replace(b": ", b": NaN, ", 1),
        }
        fixed["huge"] = b'{"hidden_size": 1' + b"0" * 100_000 + b"}"
        fixed["kinds"] = re.sub(rb': ?(\d+|"\w+")', b': {"x": [null]}', data[:1_000_000])
        fixed["utf-16"] = data[:1000].decode("latin-1").encode("utf-16")
        path.write_bytes(fixed[shape])


def files(rng: random.Random, bench: Bench) -> Iterator[Case]:
    """Yield irregular files, or ones with wrong content, for every file that spd opens."""
    for row, shape in product(TABLES["OPENED"], SHAPES.split()):
        name, line = row.split(":")
        if shape == "fifo" and line.strip():
            continue  # a file that is named may be a pipe: it is waited for, as cat does

        def spoil(
            place: Path, name: str = name, shape: str = shape, seed: int = rng.getrandbits(32)
        ) -> None:
            (place / "good.jsonl").write_text('{"prompt": "hi"}\n')
            become(place / name, shape, random.Random(seed))

        yield Case(f"{shape} as {name}", line.strip() or rng.choice(COMMANDS), spoil)


def bombs(rng: random.Random, bench: Bench) -> Iterator[Case]:
    """Yield values that would take all memory or time, in every field of the tokenizer's files."""
    added = (
        '"single_word": false, "lstrip": true, "rstrip": true, "normalized": false, "special": true'
    )
    twice = (
        '{"type": "TemplateProcessing", "single": [TEXT, TEXT], "pair": [], "special_tokens": {}}'
    )
    short = {
        "DOUBLING": ", ".join(
            ['{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}'] * 48
        ),
        "NESTED": '{"type": "Sequence", "normalizers": [' * 300 + "]}" * 300,
        "MEGA": '"' + "x" * 10**6 + '"',
        "TWICE": ", ".join([twice] * 40),
        "TAGS": ", ".join(["TAG"] * 3000),
        "TAG": '{"SpecialToken": {"id": "t", "type_id": 0}}',
        "TEXT": '{"Sequence": {"id": "A", "type_id": 0}}',
        "IDS": json.dumps({"id": "t", "ids": [258] * 10**6, "tokens": ["t"] * 10**6}),
        "MANY": ", ".join(f'{{"id": {n}, "content": "<{n}>", {added}}}' for n in range(200_000)),
        "NAMES": json.dumps([str(n) for n in range(10**6)])[1:-1],
        "PAIRS": ", ".join(['"a a"'] * 10**6),
        "ADDED": added,
    }
    several: dict[str, tuple[Any, ...]] = {
        "REGEX": tuple({"Regex": regex} for regex in (*TABLES["REGEXES"], "(" * 5000, "")),
        "NUMBER": (-1, 0, 1.5, 2**31, 2**32 - 1, 2**63, 1 << 24, "x"),
        "CONTENT": ("", "x" * 10**6, " ", "\0", "\n", "a"),
    }
    for line in TABLES["BOMBS"]:
        field, text = line.split(": ", 1)
        is_allowed = field == "added_tokens" or not re.search(r"_tokens?$|_decoder|template", field)
        name = "tokenizer.json" if is_allowed else "tokenizer_config.json"
        for word, full_word in short.items():
            text = text.replace(word, full_word)
        word = next((word for word in several if word in text), "")
        for value in several.get(word, (0,)):
            bomb = json.loads(text.replace(word, json.dumps(value)) if word else text)
            for command in rng.sample(COMMANDS[:5] if field == "chat_template" else COMMANDS, 2):
                yield Case(f"bomb in {line[:90]}", command, put(name, field, bomb))


@pytest.mark.parametrize("kind", [strings, files, bombs])
def test_hostile_input_is_refused_or_shown_harmlessly(kind: Any, bench: Bench) -> None:
    """Print no control character, exit with a documented status, end in time and memory."""
    bench.faults = []
    bench.count = 0
    for case in kind(random.Random(kind.__name__), bench):
        bench.run(case)
    print(f"{bench.count} cases of {kind.__name__}")
    assert not bench.faults, "\n".join(bench.faults)


def test_what_a_hub_says_is_shown_harmlessly(bench: Bench) -> None:
    bench.faults = []
    for evil, status in product(EVIL, (200, 404)):
        files = {"config.json": b"{}", "model.safetensors": b"12345678"}
        hub = Hub(files, extra=[evil, f"{evil}.json"], status=status)
        server = serve(hub)
        for words in ("--dry-run", "--json --dry-run", "-v --color never"):
            bench.run(Case("hub", f"pull {NAME} {words}"), HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
        server.shutdown()
    assert not bench.faults, "\n".join(bench.faults)


def test_no_command_imports_what_lies_in_the_working_directory(bench: Bench) -> None:
    """Modules beside the model and in it, for every command that starts a process."""
    place = bench.folder / "canary"
    shutil.copytree(bench.folder / "tiny", place / "model")
    trap = f"open({str(place / 'sprung')!r}, 'a').write(__file__ + chr(10))\n"
    for folder, name in product((place, place / "model"), CANARIES.split()):
        (folder / f"{name}.py").write_text(trap)
    env = {k: v for k, v in bench.env.items() if k != "PYTHONPATH"} | {
        "XDG_CACHE_HOME": str(place / "cache")
    }
    lines = [f"{line} --tp {ranks}" for line in (*COMMANDS[:5:4], COMMANDS[11]) for ranks in (1, 2)]
    lines += [
        "inspect model",
        "convert-mtp demo head --verify --force",
        "doctor --quick",
        "doctor",
        "ls",
    ]
    for line, folder in product(lines, (place, place / "model")):
        words = line.replace("model", "model" if folder == place else ".").split()
        spd = [str(Path(sys.executable).parent / "spd"), *words]
        ran = subprocess.run(
            spd, cwd=folder, env=env, input=b"hi\n", capture_output=True, timeout=600
        )
        assert ran.returncode in ({0, 1} if "doctor" in line else {0, 2}), (spd, ran)
    assert not (place / "sprung").exists(), (place / "sprung").read_text()


if __name__ == "__main__":
    serve_cases()

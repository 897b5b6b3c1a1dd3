"""A coding agent's conversation, replayed turn by turn: what is prefilled, acceptance, memory, equal texts.

    python -m benchmarks.agent_replay [--model demo-hybrid] [--window 24k] [--parts FOLDER] [--out FILE]

Each request goes the way that one of `spd serve` goes: the body of a chat completion with tools and with a
line of instructions that changes each time, which a rule leaves out. First the model says a few tokens of
its own, which must be those of an engine without a cache and without drafts. Then it writes what the
transcript says, held to it by a grammar, so that all methods draft for the same text: it reads a file, or
copies lines of the last one into an edit. Results have 1,000 to 20,000 tokens. Where the window is full, the
agent compacts: its first message, a summary and the last turns stay. A context beyond the model's own is made
by its configuration: what learned drafters accept there is not what they would.

`new_tokens` are those behind what a prompt shares with the one before: the last reply and its result, or
after a compaction all behind the first message. The last token of a prompt is fed by the first round, so a
prefill writes one less. What it writes beyond the new ones is the beginning of a chunk that was not whole
before. `without_rule` has 20 turns at most. With `--parts`, each run is kept in a file of that folder, a line
for each turn, and another start goes on with what is missing.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import random
import resource
import shutil
import tempfile
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.options import GenerateOptions
from spd.cli.parser import parse_token_count
from spd.cli.run_settings import plan_settings
from spd.formats.chat_template import ChatTemplate
from spd.formats.demo import demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import Engine, Request, RequestMetrics
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.engine.sequence import Sequence as EngineSequence
from spd.server.api_request import without_lines
from spd.server.chat_completions import read_chat
from spd.server.service import Service

SCHEMA = "spd.benchmarks.agent_replay/2"
METHODS = dict.fromkeys(("demo", "demo-hybrid"), ("off", "mtp", "ngram", "mtp+ngram"))
LEAST = 1_000
MOST = 20_000
"""Tokens of a result."""
ROOM = 2_000
"""Tokens of the window that are left for replies, and for what every prompt begins with."""
TASK = "Rename things where it helps."
OWN = 12
"""Tokens that the model says of its own in each turn."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if loop.first and tools %}\n{{ tools | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
CLOCK = "Time: "
SOURCES = (
    "argparse",
    "ast",
    "csv",
    "difflib",
    "functools",
    "heapq",
    "inspect",
    "textwrap",
    "tokenize",
    "typing",
)
"""Modules of the standard library whose source the tool returns."""


def function(name: str, **properties: str) -> dict[str, Any]:
    """Return a tool whose arguments are texts."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    function("read", path="string"),
    function("edit", path="string", old="string", new="string"),
]


@dataclasses.dataclass(frozen=True)
class Turn:
    """A tool call of the assistant, and its result."""

    name: str
    arguments: dict[str, str]
    result: str

    @property
    def call_text(self) -> str:
        """Return the call as the template writes it."""
        return (
            f"<tool_call>{json.dumps({'name': self.name, 'arguments': self.arguments})}</tool_call>"
        )

    def messages(self, number: int) -> list[dict[str, Any]]:
        """Return the call and its result as an agent sends them."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": call["id"], "content": self.result}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def transcript(count: int, tokenizer: Tokenizer) -> list[Turn]:
    """Return turns that read a file and edit it by turns; the same for the same arguments."""
    chance = random.Random(0)
    turns = list[Turn]()
    lines = list[str]()
    for number in range(count):
        path = f"{SOURCES[number // 2 % len(SOURCES)]}.py"
        if number % 2 == 0:
            source = inspect.getsource(import_module(path[:-3])).splitlines()
            size = round(LEAST * (MOST / LEAST) ** chance.random())
            start = chance.randrange(len(source))
            ids = tokenizer.encode("\n".join((source * 4)[start : start + 4000]))[:size]
            result = tokenizer.decode(ids).replace("\ufffd", "")
            lines = [line for line in result.splitlines() if line.strip()]
            turns.append(Turn("read", {"path": path}, result))
        else:
            first = chance.randrange(max(1, len(lines) - 12))
            old = lines[first : first + 12]
            new = [*old[:-1], old[-1] + "  # changed"]
            arguments = {"path": path, "old": "\n".join(old), "new": "\n".join(new)}
            turns.append(Turn("edit", arguments, "done"))
    return turns


def conversations(
    turns: Sequence[Turn], window: int, tokenizer: Tokenizer
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield for each turn the number of the first turn that remains, and the messages."""
    sizes = [len(tokenizer.encode(turn.call_text + turn.result)) + 24 for turn in turns]
    first = 0
    for number in range(len(turns)):
        if sum(sizes[first:number]) > window - ROOM:
            first = number - 1 - (sizes[number - 2] < window // 4)
        done = "; ".join(f"{turn.name} {turn.arguments['path']}" for turn in turns[:first])
        summary = [{"role": "user", "content": f"Done so far: {done}."}] if first else []
        messages = [message for at in range(first, number) for message in turns[at].messages(at)]
        yield first, [{"role": "user", "content": TASK}, *summary, *messages]


class Replay:
    """The conversation with one engine."""

    def __init__(
        self, folder: Path, method: str, ctx: int, threads: int, *, shares: bool = True
    ) -> None:
        settings = plan_settings(
            GenerateOptions(
                model=str(folder), spec=method, ctx=ctx, threads=threads, no_server=True
            )
        )
        template = ChatTemplate("replay", {"default": TEMPLATE}, {})
        vocabulary = dataclasses.replace(settings.vocabulary, template=template)
        config = dataclasses.replace(settings.config, prefix_sharing=shares)
        self.engine = Engine(config)
        self.service = Service(
            dataclasses.replace(settings, vocabulary=vocabulary),
            ["demo"],
            SimpleNamespace(engine=lambda: self.engine),  # type: ignore[arg-type]
        )
        self.written = 0
        write = self.engine.write_prompt_part

        def counted(sequence: EngineSequence) -> int:
            """Write a part of a prompt, and count its rows."""
            rows = write(sequence)
            self.written += rows
            return rows

        vars(self.engine)["write_prompt_part"] = counted

    def request(self, messages: Sequence[dict[str, Any]], number: int, *, rule: bool) -> Request:
        """Return the request that a server would make of an agent's."""
        clock = f"{CLOCK}{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}"
        system = {"role": "system", "content": f"You edit code.\n{clock}\nBe exact."}
        body: dict[str, Any] = {"messages": [system, *messages], "tools": TOOLS, "max_tokens": OWN}
        chat_request = read_chat(
            {**body, "temperature": 0.8, "seed": number}, self.service.settings
        )
        prepared = self.service.prepare_generation(
            without_lines(chat_request, (CLOCK,)) if rule else chat_request
        )
        ((request, _),) = prepared[1]
        return request

    def run(self, request: Request) -> tuple[tuple[int, ...], RequestMetrics, int]:
        """Run a request; return its ids, its counters, and the written positions of its prompt."""
        before = self.written
        ids = list[int]()
        self.engine.add(request)
        while self.engine.has_work:
            for event in self.engine.step():
                ids += event.token_ids
                assert event.finish_reason != "error", event.error
        return tuple(ids), self.engine.metrics(request.id), self.written - before

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def constrain_reply(request: Request, expected_reply: str) -> Request:
    """Return the request with one reply that a grammar allows."""
    params = dataclasses.replace(request.params, temperature=0.0, max_tokens=None)
    grammar = GrammarSpec("lark", f"start: {json.dumps(expected_reply)}")
    return dataclasses.replace(request, id=f"{request.id}-held", params=params, grammar=grammar)


def replay(
    engine_replay: Replay,
    turns: Sequence[Turn],
    window: int,
    *,
    rule: bool = True,
    fixed: bool = True,
    numbers: Collection[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield figures of each turn, or of those in `numbers`; `own` are the model's own ids."""
    before: tuple[int, ...] = ()
    tokenizer = engine_replay.service.settings.vocabulary.need_tokenizer()
    for number, (first, messages) in enumerate(conversations(turns, window, tokenizer)):
        request = engine_replay.request(messages, number, rule=rule)
        pairs = enumerate(zip(before, request.prompt_ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(before))
        before = request.prompt_ids
        if numbers is not None and number not in numbers:
            continue
        reply_ids, metrics, written = engine_replay.run(request)
        row: dict[str, Any] = {
            "turn": number,
            "first": first,
            "prompt": len(before),
            "new": len(before) - same,
        }
        row |= {"prefilled": written, "cached": metrics.cached_tokens, "own": list(reply_ids)}
        if fixed:
            _, metrics, again = engine_replay.run(constrain_reply(request, turns[number].call_text))
            row |= {"said": metrics.completion_tokens, "rounds": metrics.rounds, "again": again}
            row |= {"drafts": metrics.draft_n, "accepted": metrics.draft_n_accepted}
        row["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        yield row


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures of all turns."""
    half = len(rows) // 2
    total = {name: sum(row[name] for row in rows) for name in ("new", "prefilled", "prompt")}
    extra = [row["prefilled"] - row["new"] for row in rows]
    totals = {
        "turns": len(rows),
        "compactions": len({row["first"] for row in rows}) - 1,
        "prompt_most": max(row["prompt"] for row in rows),
        "new_tokens": total["new"],
        "prefilled_tokens": total["prefilled"],
        "prompt_tokens": total["prompt"],
        "prefilled_beyond_new_most": max(extra),
        "cached_is_true": all(
            row["cached"] + row["prefilled"] == row["prompt"] - 1 for row in rows
        ),
        "rss_growth_second_half_bytes": max(row["rss"] for row in rows[half:])
        - max(row["rss"] for row in rows[:half]),
    }
    if "said" in rows[0]:
        reply_tokens, rounds, drafts, accepted = (
            sum(row[n] for row in rows) for n in ("said", "rounds", "drafts", "accepted")
        )
        totals |= {"said_tokens": reply_tokens, "tokens_per_round": round(reply_tokens / rounds, 4)}
        totals |= {"acceptance_rate": round(accepted / drafts, 4) if drafts else None}
        totals |= {"prefilled_again": sum(row["again"] for row in rows)}
    return totals


@dataclasses.dataclass
class Runs:
    """The runs of one model, each stored as lines of a file."""

    name: str
    folder: Path
    parts: Path
    ctx: int
    threads: int

    def rows(
        self,
        part: str,
        turns: Sequence[Turn],
        method: str,
        *,
        rule: bool = True,
        fixed: bool = True,
        numbers: Collection[int] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the figures of a run's turns.

        A cold run continues where it was; others begin anew if incomplete.
        """
        cold = part == "cold"
        path = self.parts / f"{self.name}-{part}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        numbers = range(len(turns)) if numbers is None else numbers
        if len(rows) == len(numbers):
            return rows
        rows, remaining = (
            (rows, set(numbers) - {row["turn"] for row in rows}) if cold else ([], set(numbers))
        )
        engine_replay = Replay(self.folder, method, self.ctx, self.threads, shares=not cold)
        with path.open("a" if cold else "w") as file:
            for row in replay(
                engine_replay, turns, self.ctx, rule=rule, fixed=fixed, numbers=remaining
            ):
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
        engine_replay.close()
        return rows


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every method on one model, and a run without a cache to compare with."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        shutil.copytree(demo_folder(name), folder)
        config = json.loads((folder / "config.json").read_text())
        longest = config["max_position_embeddings"]
        config["max_position_embeddings"] = max(longest, arguments.window)
        (folder / "config.json").write_text(json.dumps(config))
        parts = arguments.parts or Path(place)
        parts.mkdir(parents=True, exist_ok=True)
        runs = Runs(
            name=name, folder=folder, parts=parts, ctx=arguments.window, threads=arguments.threads
        )
        tokenizer = ModelFolder(folder).tokenizer
        assert tokenizer is not None
        turns = transcript(arguments.turns, tokenizer)
        sizes = [len(tokenizer.encode(turn.result)) for turn in turns if turn.name == "read"]
        result: dict[str, Any] = {"model": name, "window": arguments.window, "own_ctx": longest}
        result |= {
            "turns": arguments.turns,
            "result_tokens": [min(sizes), max(sizes)],
            "methods": {},
        }
        rows_by_method = {method: runs.rows(method, turns, method) for method in METHODS[name]}
        alone = runs.rows("without_rule", turns[:20], "off", rule=False, fixed=False)
        cold_numbers = range(0, arguments.turns, arguments.cold_every)
        cold = {
            row["turn"]: row["own"]
            for row in runs.rows("cold", turns, "off", fixed=False, numbers=cold_numbers)
        }
        for method, rows in rows_by_method.items():
            equal = sum(rows[number]["own"] == reply_ids for number, reply_ids in cold.items())
            result["methods"][method] = {
                **summed(rows),
                "turns_equal_to_cold": equal,
                "turns_cold": len(cold),
            }
        return {**result, "without_rule": summed(alone)}


def main() -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", action="append", choices=sorted(METHODS))
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--window", type=parse_token_count, default=parse_token_count("24k"))
    parser.add_argument(
        "--cold-every", type=int, default=1, help="run every n-th turn without a cache, too"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        **describe_commit("spd", "benchmarks/agent_replay.py"),
        "settings": {"own_tokens": OWN, "tools": len(TOOLS), "threads": arguments.threads},
        "models": [measure(name, arguments) for name in arguments.model or ["demo-hybrid", "demo"]],
    }
    text = json.dumps(result, indent=1)
    print(text) if arguments.out is None else arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

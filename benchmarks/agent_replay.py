"""A coding agent's conversation, replayed turn by turn: what is prefilled, acceptance, memory, equal texts.

    python -m benchmarks.agent_replay [--model demo-hybrid] [--turns 60] [--ctx 8k] [--out FILE]

Each request goes the way that one of `spd serve` goes: the body of a chat completion with tools and with a
line of instructions that changes each time, which a rule leaves out. First the model says a few tokens of
its own, which must be those of an engine without a cache and without drafts. Then it writes what the
transcript says, held to it by a grammar, so that all methods draft for the same text: it reads a file, or
copies lines of the last one into an edit. Results would have 1,000 to 20,000 tokens; they are scaled to the
context, all by one factor. A context beyond the model's own is made by its configuration: what learned
drafters accept there is not what they would.

`new_tokens` are those behind what a prompt shares with the one before: the last reply and its result. The
last token of a prompt is fed by the first round, so a prefill writes one less. What it writes beyond the new
ones is the beginning of a chunk that was not whole before. `without_rule` has 20 turns at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.options import GenerateOptions, parse_size
from spd.cli.serve.http import Service
from spd.cli.serve.wishes import read_chat, without_lines
from spd.cli.text.job import plan_settings
from spd.formats.chat_template import ChatTemplate
from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request
from spd.runtime.engine.request import GrammarText

SCHEMA = "spd.benchmarks.agent_replay/1"
METHODS = dict.fromkeys(("demo", "demo-hybrid"), ("off", "mtp", "ngram", "mtp+ngram"))
LEAST, MOST = 1_000, 20_000
"""Tokens of a result, before it is scaled."""
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
    """A tool with arguments that are texts."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [function("read", path="string"), function("edit", path="string", old="string", new="string")]


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the assistant writes, and the message that answers it."""

    name: str
    arguments: dict[str, str]
    result: str

    @property
    def said(self) -> str:
        """The call as the template writes it."""
        return f"<tool_call>{json.dumps({'name': self.name, 'arguments': self.arguments})}</tool_call>"

    def messages(self, number: int) -> list[dict[str, Any]]:
        """The call and its result as an agent sends them."""
        told = {"name": self.name, "arguments": json.dumps(self.arguments)}
        call = {"id": f"call_{number}", "type": "function", "function": told}
        result = {"role": "tool", "tool_call_id": call["id"], "content": self.result}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


def transcript(count: int, scale: float, tokenizer: Any) -> list[Turn]:
    """Turns that read a file and edit it by turns; the same for the same arguments."""
    chance, turns, lines = random.Random(0), list[Turn](), list[str]()
    for number in range(count):
        path = f"{SOURCES[number // 2 % len(SOURCES)]}.py"
        if number % 2 == 0:
            source = inspect.getsource(import_module(path[:-3])).splitlines()
            size, start = (
                round(scale * LEAST * (MOST / LEAST) ** chance.random()),
                chance.randrange(len(source)),
            )
            text = "\n".join((source * 2)[start : start + 2000])
            ids = tokenizer.encode(text)[:size]
            result = tokenizer.decode(ids).replace("\ufffd", "")
            lines = [line for line in result.splitlines() if line.strip()] or ["pass"]
            turns.append(Turn("read", {"path": path}, result))
        else:
            first = chance.randrange(max(1, len(lines) - 3))
            old = lines[first : first + max(1, round(12 * min(1.0, 10 * scale)))]
            new = [*old[:-1], old[-1] + "  # changed"]
            arguments = {"path": path, "old": "\n".join(old), "new": "\n".join(new)}
            turns.append(Turn("edit", arguments, "done"))
    return turns


class Replay:
    """The conversation with one engine."""

    def __init__(self, folder: Path, method: str, ctx: int, threads: int, *, shares: bool = True) -> None:
        settings = plan_settings(
            GenerateOptions(model=str(folder), spec=method, ctx=ctx, threads=threads, no_server=True)
        )
        template = ChatTemplate("replay", {"default": TEMPLATE}, {})
        vocabulary = dataclasses.replace(settings.vocabulary, template=template)
        config = dataclasses.replace(settings.config, prefix_sharing=shares)
        self.engine: Any = Engine(config)
        self.service = Service(
            dataclasses.replace(settings, vocabulary=vocabulary),
            "demo",
            SimpleNamespace(engine=lambda: self.engine),  # type: ignore[arg-type]
        )
        self.written, write = 0, self.engine._write_part

        def counted(sequence: Any) -> int:
            rows: int = write(sequence)
            self.written += rows
            return rows

        vars(self.engine)["_write_part"] = counted

    def request(self, messages: Sequence[dict[str, Any]], number: int, *, rule: bool) -> Request:
        """The request that a server would make of an agent's."""
        clock = f"{CLOCK}{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}"
        system = {"role": "system", "content": f"You edit code.\n{clock}\nBe exact."}
        body = {"messages": [system, *messages], "tools": TOOLS, "max_tokens": OWN}
        wish = read_chat({**body, "temperature": 0.8, "seed": number}, self.service)
        ((request, _),) = self.service.prepare(without_lines(wish, (CLOCK,)) if rule else wish)
        return request

    def run(self, request: Request) -> tuple[tuple[int, ...], Any, int]:
        """What a request brought, its counters, and the positions of its prompt that were written."""
        before, ids = self.written, list[int]()
        self.engine.add(request)
        while self.engine.has_work:
            for event in self.engine.step():
                ids += event.token_ids
                assert event.finish_reason != "error", event.error
        return tuple(ids), self.engine.metrics(request.id), self.written - before

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()


def held(request: Request, said: str) -> Request:
    """The same with one reply that a grammar allows."""
    params = dataclasses.replace(request.params, temperature=0.0, max_tokens=None)
    grammar = GrammarText("lark", f"start: {json.dumps(said)}")
    return dataclasses.replace(request, id=f"{request.id}-held", params=params, grammar=grammar)


def replay(
    one: Replay, turns: Sequence[Turn], *, rule: bool = True, fixed: bool = True
) -> Iterator[dict[str, Any]]:
    """Figures of each turn; `own` is what the model said of its own."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Rename things where it helps."}]
    before: tuple[int, ...] = ()
    for number, turn in enumerate(turns):
        request = one.request(messages, number, rule=rule)
        same = next(
            (i for i, (a, b) in enumerate(zip(before, request.prompt_ids, strict=False)) if a != b),
            len(before),
        )
        own, metrics, written = one.run(request)
        row: dict[str, Any] = {"prompt": len(request.prompt_ids), "new": len(request.prompt_ids) - same}
        row |= {"prefilled": written, "cached": metrics.cached_tokens, "own": own}
        if fixed:
            _, metrics, again = one.run(held(request, turn.said))
            row |= {"said": metrics.completion_tokens, "rounds": metrics.rounds, "again": again}
            row |= {"drafts": metrics.draft_n, "accepted": metrics.draft_n_accepted}
        row["rss"] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        yield row
        before = request.prompt_ids
        messages += turn.messages(number)


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all turns."""
    half = len(rows) // 2
    total = {name: sum(row[name] for row in rows) for name in ("new", "prefilled", "prompt")}
    extra = [row["prefilled"] - row["new"] for row in rows]
    shown = {
        "new_tokens": total["new"],
        "prefilled_tokens": total["prefilled"],
        "prompt_tokens": total["prompt"],
        "prefilled_beyond_new_most": max(extra),
        "cached_is_true": all(row["cached"] + row["prefilled"] == row["prompt"] - 1 for row in rows),
        "rss_growth_second_half_bytes": max(row["rss"] for row in rows[half:])
        - max(row["rss"] for row in rows[:half]),
    }
    if "said" in rows[0]:
        said, rounds, drafts, accepted = (
            sum(row[n] for row in rows) for n in ("said", "rounds", "drafts", "accepted")
        )
        shown |= {"said_tokens": said, "tokens_per_round": round(said / rounds, 4)}
        shown |= {"acceptance_rate": round(accepted / drafts, 4) if drafts else None}
        shown |= {"prefilled_again": sum(row["again"] for row in rows)}
    return shown


def measure(name: str, count: int, ctx: int, threads: int) -> dict[str, Any]:
    """Every method on one model, with a run without a cache to compare with."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name
        shutil.copytree(demo_folder(name), folder)
        config = json.loads((folder / "config.json").read_text())
        longest = config["max_position_embeddings"]
        config["max_position_embeddings"] = max(longest, ctx)
        (folder / "config.json").write_text(json.dumps(config))
        cold = Replay(folder, "off", ctx, threads, shares=False)
        tokenizer = cold.service.settings.vocabulary.need_tokenizer()
        scale = scale_of(count, ctx, tokenizer)
        turns = transcript(count, scale, tokenizer)
        plain = list(replay(cold, turns, fixed=False))
        cold.close()
        sizes = [len(tokenizer.encode(turn.result)) for turn in turns if turn.name == "read"]
        found: dict[str, Any] = {"model": name, "ctx": ctx, "own_ctx": longest, "scale": scale}
        found |= {"result_tokens": [min(sizes), max(sizes)], "cold": summed(plain), "methods": {}}
        for method in METHODS[name]:
            one = Replay(folder, method, ctx, threads)
            rows = list(replay(one, turns))
            one.close()
            equal = sum(row["own"] == other["own"] for row, other in zip(rows, plain, strict=True))
            found["methods"][method] = {**summed(rows), "turns_equal_to_cold": equal, "turns": len(rows)}
            print(name, method, found["methods"][method], file=sys.stderr, flush=True)
        one = Replay(folder, "off", ctx, threads)
        found["without_rule"] = summed(list(replay(one, turns[:20], rule=False, fixed=False)))
        one.close()
    return found


def scale_of(count: int, ctx: int, tokenizer: Any) -> float:
    """The largest factor, of halves of one, with which the conversation fits the context."""
    scale = 1.0
    while True:
        said = "".join(turn.said + turn.result for turn in transcript(count, scale, tokenizer))
        if len(tokenizer.encode(said)) + 24 * count + 600 < ctx:
            return scale
        scale /= 2


def main() -> None:
    """Measure, and print or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", action="append", choices=sorted(METHODS))
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--ctx", type=parse_size, default=parse_size("8k"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    models = given.model or ["demo-hybrid", "demo"]
    found = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        **describe_commit("spd", "benchmarks/agent_replay.py"),
        "settings": {"turns": given.turns, "own_tokens": OWN, "tools": len(TOOLS), "threads": given.threads},
        "models": [measure(name, given.turns, given.ctx, given.threads) for name in models],
    }
    text = json.dumps(found, indent=1)
    print(text) if given.out is None else given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()

"""Whether a server's speculation changes its text: replies with it off and on, and controls.

Each question is asked twice with speculation off and twice with it on, in shuffled order, so that
off/off and on/on pairs show how far the server repeats itself at all. Questions whose text differs
between the modes are asked anew, and only these fresh replies decide about the cause, by a
permutation test. No torch here.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations, product
from math import ceil, comb
from typing import Literal

from spd.errors import IncompatibleError
from spd.runtime.engine.request import derived_seed
from spd.runtime.lab.api_client import ApiClient, ApiReply
from spd.runtime.lab.prompt_set import Prompt

Mode = Literal["off", "on"]
MODES: tuple[Mode, ...] = ("off", "on")
REPLIES = 2
"""Replies to each question in each mode."""
FRESH_REPLIES = 7
"""Replies in each mode to a question whose text differed: one such question can show the cause."""
FRESH_QUESTIONS = 3
"""Questions of a setting that are asked anew at most."""
FALSE_ALARM_CHANCE = 0.001
"""The probability, in each setting, that speculation is blamed where it changes nothing."""
LIE_PERIOD = 500
"""The chance is given of missing a server that changes one token in so many."""
SEED_SHIFT = 22
"""Bits that seeds are shortened by, for servers whose seeds have 31 bits."""
Watch = Callable[[str, int, int], object]
"""Called with what is asked, and with how many of so many replies have come; may raise to end."""


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling parameters."""

    prompt: Prompt
    temperature: float
    seed: int


Replies = Mapping[Mode, list[ApiReply]]


@dataclass
class Setting:
    """Questions at one temperature, asked so many at a time, and their replies."""

    temperature: float
    concurrency: int
    questions: Sequence[Question]
    replies: dict[Question, Replies] = field(default_factory=dict)
    fresh: dict[Question, Replies] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the setting in words."""
        company = "alone" if self.concurrency == 1 else f"{self.concurrency} at once"
        return f"T {self.temperature:g}, {company}"

    def changed(self) -> list[Question]:
        """Return the questions whose first replies differ with speculation off and on."""
        return [
            question
            for question, replies in self.replies.items()
            if all(replies.values()) and replies["off"][0].key != replies["on"][0].key
        ]

    def verdict(self) -> Literal["equal", "speculation", "unrepeatable"]:
        """Return what the replies show: see `chance_of_modes` about speculation as the cause."""
        if not any(count_pairs(self.replies, pair).differing for pair in PAIRS):
            return "equal"
        between, *controls = (count_pairs(self.fresh, pair).share for pair in PAIRS)
        exceeds = between > max(controls)
        return "speculation" if exceeds and self.chance() <= FALSE_ALARM_CHANCE else "unrepeatable"

    def chance(self) -> float:
        """Return the chance of the fresh replies if speculation changes nothing; 1 without any."""
        return chance_of_modes(
            [
                ([reply.key for reply in replies["off"]], [reply.key for reply in replies["on"]])
                for replies in self.fresh.values()
            ]
        )


PAIRS: tuple[tuple[Mode, Mode], ...] = (("off", "on"), ("off", "off"), ("on", "on"))
"""Modes whose replies are compared: the question first, then the controls."""


@dataclass(frozen=True)
class PairCount:
    """How many pairs of replies to the same question differ."""

    differing: int
    pairs: int

    @property
    def share(self) -> float:
        """Return the differing share; 0 without pairs."""
        return self.differing / self.pairs if self.pairs else 0.0


def count_pairs(replies: Mapping[Question, Replies], modes: tuple[Mode, Mode]) -> PairCount:
    """Compare all replies in the first mode with all others in the second, question by question."""
    first, second = modes
    equalities: list[bool] = []
    for by_mode in replies.values():
        pairs = [*product(by_mode[first], by_mode[second])]
        if first == second:
            pairs = [*combinations(by_mode[first], 2)]
        equalities += [a.key == b.key for a, b in pairs]
    return PairCount(equalities.count(False), len(equalities))


def chance_of_modes(questions: Sequence[tuple[Sequence[object], Sequence[object]]]) -> float:
    """Return the probability of replies that differ between two modes in so many pairs or more.

    questions: the replies to each in either mode, asked in shuffled order. If the mode changes
    nothing, every way to divide a question's replies between the modes is equally likely: this is
    the exact test over them.
    """
    observed = 0
    total = Counter({0: 1})  # ways by pairs of equal replies
    for off, on in questions:
        off_counts = Counter(off)
        on_counts = Counter(on)
        observed += sum(count * on_counts[reply] for reply, count in off_counts.items())
        divisions = _divisions([*(off_counts + on_counts).values()], len(off))
        sums: Counter[int] = Counter()
        for (a, a_ways), (b, b_ways) in product(total.items(), divisions.items()):
            sums[a + b] += a_ways * b_ways
        total = sums
    ways = sum(count for pairs, count in total.items() if pairs <= observed)
    return ways / total.total()


def _divisions(sizes: Sequence[int], off: int) -> Counter[int]:
    """Return in how many ways `off` replies are chosen, by pairs of one of them and an equal other.

    sizes: how many replies are equal to each other.
    """
    ways = Counter({(0, 0): 1})  # by replies that are chosen, and equal pairs
    for size in sizes:
        longer: Counter[tuple[int, int]] = Counter()
        for ((chosen, pairs), count), number in product(ways.items(), range(size + 1)):
            equal_pairs = pairs + number * (size - number)
            longer[chosen + number, equal_pairs] += count * comb(size, number)
        ways = longer
    return Counter({pairs: count for (chosen, pairs), count in ways.items() if chosen == off})


def make_settings(
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    concurrencies: Sequence[int],
    *,
    max_tokens: int,
    min_tokens: int,
) -> list[Setting]:
    """Return settings of every temperature, each alone and in company.

    Above temperature 0 questions repeat with new seeds, until the replies could hold `min_tokens`;
    those to a greedy question count once.
    """
    sampled = sum(temperature > 0 for temperature in temperatures)
    greedy_tokens = (len(temperatures) - sampled) * len(prompts) * max_tokens
    tokens_a_seed = sampled * len(concurrencies) * len(prompts) * max_tokens
    repetitions = ceil((min_tokens - greedy_tokens) / tokens_a_seed) if sampled else 1
    settings = []
    for (place, concurrency), temperature in product(enumerate(concurrencies), temperatures):
        numbers = range(place, max(1, repetitions) * len(concurrencies), len(concurrencies))
        questions = [
            Question(prompt, temperature, derived_seed(0, prompt.name, number) >> SEED_SHIFT)
            for number, prompt in product(numbers if temperature else [0], prompts)
        ]
        settings.append(Setting(temperature, concurrency, questions))
    return settings


@dataclass(frozen=True)
class Target:
    """A server, and the fields of a request that set its speculation to a mode."""

    server: ApiClient
    fields: Mapping[str, object]
    """The model's name among them."""


class ServerCheck:
    """Asks a server every question of every setting with speculation off and on."""

    def __init__(
        self, targets: Mapping[Mode, Target], settings: Sequence[Setting], max_tokens: int
    ) -> None:
        """Prepare the check of `targets`, by mode; results go into `settings`."""
        self.settings = settings
        self._targets = targets
        self._max_tokens = max_tokens
        self._draws = random.Random(0)
        self.drafts: dict[Mode, Counter[str]] = {mode: Counter() for mode in MODES}
        """Tokens that the server reports as drafted and accepted."""

    def run(self, watch: Watch) -> None:
        """Ask all questions, and those whose text differs anew.

        Raises SpdError for a server that fails; what came until then stays in the settings.
        """
        server = self._targets["on"].server
        counts = server.read_draft_counts()
        for setting in self.settings:
            self._ask_all(setting, setting.questions, setting.replies, REPLIES, watch)
            changed = setting.changed()[:FRESH_QUESTIONS]
            self._ask_all(setting, changed, setting.fresh, FRESH_REPLIES, watch)
        if not self.drafts["on"]["drafted"]:  # no reply has said how many it had
            self.drafts["on"] = server.read_draft_counts() - counts

    def ask(self, question: Question, mode: Mode, **fields: object) -> ApiReply:
        """Send a question to the server of a mode, and return its reply.

        fields: further fields of the request. Raises SpdError.
        """
        target = self._targets[mode]
        return target.server.chat(
            {
                "messages": [{"role": "user", "content": question.prompt.text}],
                "max_tokens": self._max_tokens,
                "temperature": question.temperature,
                "seed": question.seed,
                **target.fields,
                **fields,
            }
        )

    @property
    def tokens(self) -> int:
        """Return the tokens that were compared, those of a question in a setting once."""
        return sum(
            _count_tokens(replies)
            for setting in self.settings
            for replies in setting.replies.values()
            if all(replies.values())
        )

    @property
    def different_tokens(self) -> int:
        """Return the tokens of replies to different questions: greedy ones are the same again."""
        return sum(
            {
                question: _count_tokens(replies)
                for setting in self.settings
                for question, replies in setting.replies.items()
                if all(replies.values())
            }.values()
        )

    @property
    def chance_missed(self) -> float:
        """Return the chance that no token differs where one in LIE_PERIOD is changed."""
        return float((1 - 1 / LIE_PERIOD) ** self.different_tokens)

    @property
    def false_alarm(self) -> float:
        """Return the most that the chance of blaming a speculation that changes nothing can be."""
        return FALSE_ALARM_CHANCE * len(self.settings)

    def _ask_all(
        self,
        setting: Setting,
        questions: Sequence[Question],
        replies: dict[Question, Replies],
        count: int,
        watch: Watch,
    ) -> None:
        """Append `count` replies in each mode to every question, asked in shuffled order."""
        tasks = [(question, mode) for question in questions for mode in MODES for _ in range(count)]
        self._draws.shuffle(tasks)
        for question in questions:
            replies[question] = {mode: [] for mode in MODES}
        for number, (question, mode, reply) in enumerate(self._replies(tasks, setting.concurrency)):
            if mode == "off" and reply.drafted:
                raise _still_drafts(reply.drafted)
            replies[question][mode].append(reply)
            self.drafts[mode].update(drafted=reply.drafted or 0, accepted=reply.accepted or 0)
            watch(setting.name, number + 1, len(tasks))

    def _replies(
        self, tasks: Sequence[tuple[Question, Mode]], concurrency: int
    ) -> Iterator[tuple[Question, Mode, ApiReply]]:
        """Yield replies as they come; each server has `concurrency` requests at a time.

        One at a time is one of all servers.
        """
        results: queue.SimpleQueue[tuple[Question, Mode, ApiReply | Exception]]
        results = queue.SimpleQueue()
        lines: dict[ApiClient | None, list[tuple[Question, Mode]]] = {}
        for question, mode in tasks:
            server = self._targets[mode].server if concurrency > 1 else None
            lines.setdefault(server, []).append((question, mode))

        def work(line: list[tuple[Question, Mode]]) -> None:
            """Ask what is in a line until it is empty. `list.pop` is safe among threads."""
            with suppress(IndexError):
                while True:
                    question, mode = line.pop()
                    try:
                        results.put((question, mode, self.ask(question, mode)))
                    except Exception as error:
                        results.put((question, mode, error))

        for line, _ in product(lines.values(), range(concurrency)):
            threading.Thread(target=work, args=(line,), daemon=True).start()
        for _ in tasks:
            question, mode, reply = results.get()
            if isinstance(reply, Exception):
                for line in lines.values():
                    line.clear()
                raise reply
            yield question, mode, reply


def _still_drafts(count: int) -> IncompatibleError:
    """Return the error for a reply of a server that is to draft nothing."""
    message = f"the server reports {count} draft tokens in a reply that is to have none"
    reason = ["servers pass over fields that they do not know"]
    fix = ["another --toggle", "--against URL, of the same model without drafts"]
    return IncompatibleError(message, reason=reason, fix=fix)


def _count_tokens(replies: Replies) -> int:
    """Return the tokens of a first reply with speculation on; 0 if they are not known."""
    return replies["on"][0].tokens or 0

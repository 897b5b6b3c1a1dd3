"""`spd verify URL`: check whether the speculation of a server changes its text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from spd.cli.commands.bench import parse_temperature_list, requested_prompts
from spd.cli.commands.verify_options import VerifyOptions
from spd.cli.options import is_url
from spd.cli.signals import Interrupted
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.tables import fact_lines
from spd.errors import CheckFailedError, UsageError
from spd.runtime.lab import LIE_PERIOD, PAIRS, count_pairs
from spd.version import __version__

if TYPE_CHECKING:
    from spd.runtime.lab import (
        ApiClient,
        Mode,
        Question,
        Replies,
        ServerCheck,
        Setting,
        Target,
        TextDifference,
    )

VERIFY_SERVER_SCHEMA = "spd.verify-server/1"
"""The `schema` of a certificate."""
SERVER_OPTIONS = frozenset(
    {
        "against",
        "api_key",
        "color",
        "concurrency",
        "json",
        "max_tokens",
        "model",
        "model_argument",
        "prompts",
        "quiet",
        "temperature",
        "toggle",
        "tokens",
        "verbose",
    }
)
"""Names of the options of `spd verify` that may go with a server."""
DEFAULT_CONCURRENCY = 4
"""Requests at a time unless --concurrency is set."""
CHANCE_SHARE = 1 / 32
"""The share of accepted drafts below which they are about as good as chance."""
MIN_CHANCE_DRAFTS = 200
"""Drafts from which that is said."""
MAX_DESCRIBED_DIFFERENCES = 10
"""Differences that the result describes."""
MAX_LISTED_MODELS = 10
"""Names of models in an error."""
TOGGLE_FIXES = (
    "--toggle speculative.spec=auto/off  (spd serve)",
    "--against http://HOST:PORT  (the same model without drafts: llama-server, vLLM, SGLang)",
)
"""Fixes of the error for a check without a way to switch speculation off."""


def verify_server(session: Session, options: VerifyOptions) -> None:
    """Send a server requests with speculation on and off, and write the result to stdout.

    Raises CheckFailedError if texts differ, after the result is written; Interrupted likewise.
    """
    from spd.runtime.lab import ServerCheck, describe_differences, make_settings

    _check_options(options)
    sink = Sink.stdout()
    targets = _make_targets(options)
    concurrency = options.concurrency if "concurrency" in options.typed else DEFAULT_CONCURRENCY
    prompts = requested_prompts(options.prompts)
    settings = make_settings(
        prompts,
        parse_temperature_list(options.temperature),
        sorted({1, concurrency}),
        max_tokens=options.max_tokens,
        min_tokens=options.tokens,
    )
    check = ServerCheck(targets, settings, options.max_tokens)
    report = ServerReport(options, targets, check)
    try:
        with Ticker(session.console) as ticker:
            check.run(
                lambda name, ended, total: ticker.write(f"{name}: {ended} of {total} replies")
            )
            report.differences += describe_differences(check, MAX_DESCRIBED_DIFFERENCES, asks=True)
    except Interrupted:
        report.is_interrupted = True
        report.differences = [*describe_differences(check, MAX_DESCRIBED_DIFFERENCES, asks=False)]
        sink.write_result(options.json, report.certificate(), fact_lines(report.facts()))
        raise
    sink.write_result(options.json, report.certificate(), fact_lines(report.facts()))
    _raise_verdict(settings)


def _check_options(options: VerifyOptions) -> None:
    """Raise UsageError for options of a model that runs here.

    Raises it too unless one of --toggle and --against is given.
    """
    for name in sorted(options.typed - SERVER_OPTIONS):
        reason = [f"{options.model} is a server: it has been started with its own"]
        raise UsageError(
            f"--{name.replace('_', '-')} is about a model that runs here", reason=reason
        )
    if (options.toggle is None) == ("against" not in options.typed):
        reason = ["--toggle is a field of requests, --against the address of a second server"]
        message = "one of --toggle and --against has to say how speculation is switched off"
        raise UsageError(message, reason=reason, fix=TOGGLE_FIXES)


def _make_targets(options: VerifyOptions) -> dict[Mode, Target]:
    """Return the server and the fields of its requests, `model` among them, by mode.

    Asks servers for the name of their model unless --model has it. Raises SpdError.
    """
    from spd.runtime.lab import ApiClient, Target

    on = ApiClient(options.model, options.api_key)
    if options.toggle is not None:
        model = options.served_model or _only_model(on)
        on_fields, off_fields = parse_toggle(options.toggle)
        return {
            "off": Target(on, {"model": model, **off_fields}),
            "on": Target(on, {"model": model, **on_fields}),
        }
    if not is_url(options.against):
        fix = ["--against http://HOST:PORT"]
        raise UsageError(f"--against {options.against} is no address of a server", fix=fix)
    off = ApiClient(options.against, options.api_key)
    return {
        "off": Target(off, {"model": options.served_model or _only_model(off)}),
        "on": Target(on, {"model": options.served_model or _only_model(on)}),
    }


def _only_model(server: ApiClient) -> str:
    """Ask a server for its models and return the name of the one. Raises UsageError for others."""
    names: list[str] = server.models()
    if len(names) != 1:
        reason = [f"it serves: {', '.join(names[:MAX_LISTED_MODELS]) or 'none'}"]
        message = f"{server.url} serves {len(names)} models"
        raise UsageError(message, reason=reason, fix=["--model NAME"])
    return names[0]


def parse_toggle(text: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the fields of a request with speculation on, and with it off, of `FIELD=ON/OFF`.

    Values are JSON or words. A dotted name is nested, one in quotes is not. Raises UsageError.
    """
    name, _, values = text.partition("=")
    slashes = [place for place, character in enumerate(values) if character == "/"]
    splits = [(values[:place], values[place + 1 :]) for place in slashes]
    if len(splits) > 1:  # a slash may stand within JSON
        splits = [pair for pair in splits if all(map(_is_json, pair))]
    names = [name[1:-1]] if name[:1] == name[-1:] == '"' else name.split(".")
    if len(splits) != 1 or not all(names):
        fix = [
            "--toggle speculative.spec=auto/off",
            """--toggle 'speculative={"draft_max":4}/{"draft_max":0}'""",
        ]
        raise UsageError(f"--toggle {text} is not FIELD=ON/OFF", fix=fix)
    on, off = (_nest_value(names, _json_value(value)) for value in splits[0])
    return on, off


def _nest_value(names: list[str], value: object) -> dict[str, object]:
    """Return a value inside an object for each name, the first one outermost."""
    for name in reversed(names):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _is_json(text: str) -> bool:
    """True if a text is JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_value(text: str) -> object:
    """Return the value of a JSON text, or any other text as it is."""
    return json.loads(text) if _is_json(text) else text


@dataclass
class ServerReport:
    """The result of a check, for --json and for people."""

    options: VerifyOptions
    targets: Mapping[Mode, Target]
    check: ServerCheck
    differences: list[TextDifference] = field(default_factory=list)
    is_interrupted: bool = False

    @property
    def _comparison(self) -> str:
        """Return what speculation is compared with: the toggle, or the other server's address."""
        return self.options.toggle or self.targets["off"].server.url

    @property
    def _has_passed(self) -> bool:
        """True if all texts were equal in every setting, and the check ran to its end."""
        verdicts = {setting.verdict() for setting in self.check.settings}
        return verdicts == {"equal"} and not self.is_interrupted

    def certificate(self) -> dict[str, object]:
        """Return the object whose schema is `spd/runtime/lab/schemas/verify-server.json`."""
        check = self.check
        drafts = check.drafts["on"]
        questions = [question for setting in check.settings for question in setting.questions]
        return {
            "schema": VERIFY_SERVER_SCHEMA,
            "spd": __version__,
            "server": self.targets["on"].server.url,
            "model": self.targets["on"].fields["model"],
            "against": self._comparison,
            "max_tokens": self.options.max_tokens,
            "prompts": {question.prompt.name: question.prompt.digest for question in questions},
            "settings": [_setting_result(setting) for setting in check.settings],
            "drafts": dict(drafts) if drafts["drafted"] else None,
            "tokens": check.tokens,
            "different_tokens": check.different_tokens,
            "chance_missed": check.chance_missed,
            "false_alarm": check.false_alarm,
            "differences": self.differences,
            "interrupted": self.is_interrupted,
            "passed": self._has_passed,
        }

    def facts(self) -> dict[str, object]:
        """Return the facts that are printed for people, by their labels."""
        check = self.check
        drafts = check.drafts["on"]
        missed = f"{check.chance_missed:.2g} that one changed token in {LIE_PERIOD} stays unseen"
        alarm = f"{check.false_alarm:.2g} that speculation is blamed and changes nothing"
        facts: dict[str, object] = {
            "server": self.targets["on"].server.url,
            "model": self.targets["on"].fields["model"],
            "against": self._comparison,
        }
        for setting in check.settings:
            facts[setting.name] = _setting_facts(setting)
        return facts | {
            "differences": self.differences,
            "drafts": dict(drafts) if drafts["drafted"] else "the server reports none",
            "tokens": check.tokens,
            "chances": [missed, alarm],
            "note": self._weakness_note(),
            "interrupted": self.is_interrupted or None,
            "passed": None if self.is_interrupted else self._has_passed,
        }

    def _weakness_note(self) -> str | None:
        """Return the reason why the result says little; None where there is none."""
        drafts = self.check.drafts["on"]
        if drafts["drafted"] and not drafts["accepted"]:
            return "no draft was accepted, so this tested little"
        if (
            drafts["drafted"] >= MIN_CHANCE_DRAFTS
            and drafts["accepted"] < CHANCE_SHARE * drafts["drafted"]
        ):
            return "few drafts were accepted, as by chance: is the drafter another model's?"
        if not self.check.tokens:
            return "the server counts no tokens"
        return None


def _setting_result(setting: Setting) -> dict[str, object]:
    """Return the counts of a setting and its verdict, for the certificate."""
    fresh = None
    if setting.fresh:
        fresh = {"texts": len(setting.fresh), **_pair_counts(setting.fresh)}
        fresh["chance"] = setting.chance()
    return {
        "temperature": setting.temperature,
        "concurrency": setting.concurrency,
        "texts": len(setting.replies),
        "changed": len(setting.changed()),
        **_pair_counts(setting.replies),
        "fresh": fresh,
        "verdict": setting.verdict(),
    }


def _setting_facts(setting: Setting) -> dict[str, str]:
    """Return the counts of a setting for people, by their labels."""
    facts = {"texts changed": f"{len(setting.changed())} of {len(setting.replies)}"}
    facts |= _pair_texts(setting.replies)
    if setting.fresh:
        anew = " · ".join(f"{pair} {text}" for pair, text in _pair_texts(setting.fresh).items())
        facts["asked anew"] = (
            f"{anew} · chance if speculation changes nothing {setting.chance():.2g}"
        )
    return facts


def _pair_counts(replies: Mapping[Question, Replies]) -> dict[str, object]:
    """Return the counts of compared and differing replies of each pair of modes, as JSON."""
    return {f"{a}_{b}": asdict(count_pairs(replies, (a, b))) for a, b in PAIRS}


def _pair_texts(replies: Mapping[Question, Replies]) -> dict[str, str]:
    """Return the counts of differing and compared replies of each pair of modes, for people."""
    counts = {f"{a}/{b}": count_pairs(replies, (a, b)) for a, b in PAIRS}
    return {name: f"{count.differing} of {count.pairs}" for name, count in counts.items()}


def _raise_verdict(settings: Sequence[Setting]) -> None:
    """Raise CheckFailedError if texts differ by speculation, or because the server repeats none."""
    blamed = [setting for setting in settings if setting.verdict() == "speculation"]
    unrepeatable = [setting for setting in settings if setting.verdict() == "unrepeatable"]
    if blamed:
        reason = [
            f"{setting.name}: {len(setting.changed())} of {len(setting.replies)} texts"
            for setting in blamed
        ]
        if all(setting.temperature for setting in blamed):
            reason.append(
                "a server that draws drafts and text apart promises equal texts at T 0 only"
            )
        fix = ["report the differences to the makers of the server", "--temperature 0"]
        raise CheckFailedError("speculation changes the text", reason=reason, fix=fix)
    if unrepeatable:
        names = "; ".join(setting.name for setting in unrepeatable)
        reason = ["this shows nothing about speculation: the same request gives other texts", names]
        fix = ["--temperature 0", "--concurrency 1", "a server with one slot"]
        raise CheckFailedError("the server does not repeat itself", reason=reason, fix=fix)

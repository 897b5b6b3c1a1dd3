"""`spd generate`: one prompt in, one reply out, made for pipes and scripts.

Whatever can be refused is refused before torch is imported and weights are read.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING, Any

from spd.cli.options import GenerateOptions
from spd.cli.signals import Interrupted
from spd.cli.text.job import check_conflicts
from spd.cli.text.output import (
    Console,
    Session,
    Sink,
    check_writable,
    fact_lines,
    loading,
    tell,
    to_json,
    write_error,
)
from spd.errors import EngineError

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.cli.text.prompt import Asked
    from spd.cli.text.reply import Delivery
    from spd.runtime import Engine, EngineConfig, Request
    from spd.runtime.engine.request import Gathered

REQUEST_ID = "0"


def generate(session: Session, options: GenerateOptions) -> int:
    """Answer one prompt, for pipes and scripts; the text is the same with and without speculation."""
    check_conflicts(options)  # and options are final from here on: a server gets them as they are
    for path in (options.output, options.trace):
        if path is not None:
            check_writable(path)
    sink = Sink.stdout() if options.output is None else Sink(options.output, append=options.resume)
    from spd.cli.commands.models import ensure_models

    with closing(sink):
        if not (options.trace or options.dry_run or options.jsonl):
            from spd.cli.serve.local import served_engine

            if (served := served_engine(session, options)) is not None:
                request, inside = served.prepare(session.console, options)
                return _run(session, options, served, request, inside, sink)
        ensure_models(session, options)
        if options.jsonl:
            from spd.cli.commands.jsonl import generate_lines

            return generate_lines(session, options, sink)
        from spd.cli.text.job import plan_settings
        from spd.cli.text.prompt import gather

        settings, asked = plan_settings(options), gather(options)
        request, inside = settings.request(REQUEST_ID, asked)
        if options.dry_run:
            _show_prompt(options, settings, asked, request, sink)
            return 0
        engine = load(session.console, options.model, settings.config)
        if engine.plan.shape.ctx != settings.context:  # it may be less than the model's
            settings = dataclasses.replace(settings, context=engine.plan.shape.ctx)
            request, inside = settings.request(REQUEST_ID, asked)
        say_before(session.console, options, settings, engine, request)
        return _run(session, options, engine, request, inside, sink)


def load(console: Console, name: str, config: EngineConfig) -> Engine:
    """An engine, with words on a terminal while it loads."""
    with loading(f"loading {name}", console) as progress:
        from spd.runtime import Engine

        return Engine(config, progress=progress)


def _show_prompt(
    options: GenerateOptions, settings: Settings, asked: Asked, request: Request, sink: Sink
) -> None:
    """What --dry-run shows: the prompt as text on stdout, how many tokens it is on stderr."""
    from spd.cli.text.job import render_asked

    ids = request.prompt_ids
    text = render_asked(asked, settings.vocabulary, ids)
    if not options.json:
        sink.write(text if text.endswith("\n") else text + "\n")
        tell(f"{len(ids):,} tokens of {settings.context:,}")
        return
    shown = {
        "schema": "spd.prompt/1",
        "model": options.model,
        "prompt": text,
        "prompt_ids": ids,
        "prompt_tokens": len(ids),
        "context": settings.context,
        "params": dataclasses.asdict(request.params),
    }
    sink.write(to_json(shown) + "\n")


def _run(
    session: Session,
    options: GenerateOptions,
    engine: Engine,
    request: Request,
    inside: bool | None,
    sink: Sink,
) -> int:
    """Decode and deliver; returns the exit status."""
    from spd.cli.text.reply import Delivery, Thoughts

    thoughts = Thoughts(session.console, hidden=options.think == "hide")
    delivery = Delivery(sink, engine, request, inside, thoughts, streaming=not options.json)
    trace = None if options.trace is None else Sink(options.trace)
    with closing(trace or sink):
        if trace is not None:
            from spd.runtime.lab import TraceHeader

            def record(what: Any) -> None:
                trace.write(to_json(dataclasses.asdict(what)) + "\n")

            temperature = request.params.temperature
            record(TraceHeader(options.model, temperature, engine.plan.as_dict(), request.prompt_ids))
            engine.trace = record
        engine.prefilling = thoughts.reading
        try:
            delivery.run(session.guard)
        except Interrupted:
            delivery.give_up()
            _finish(session, options, delivery)
            raise
        except Exception:
            if not options.json and (delivery.reply.text or delivery.reply.token_ids):
                delivery.finish_text()
            raise
        with session.guard.hold():
            _finish(session, options, delivery)
    engine.close()
    return _outcome(session, options, delivery.reply, request.grammar is not None)


def _outcome(session: Session, options: GenerateOptions, reply: Gathered, held: bool) -> int:
    """The exit status for a reply that has ended, which a grammar held or none. Raises EngineError."""
    if reply.finish_reason != "error":
        return 0
    fix = "--dtype float32, or run it again with -vv and report what it prints"
    failure = EngineError(
        reply.error or "the model failed while generating",
        reason=["What came before the fault was printed."],
        fix=["a grammar that always allows a next token, or a larger -n" if held else fix],
    )
    if not options.json:
        raise failure
    write_error(failure, session.console)  # the one object on stdout is the reply
    return failure.exit_code


def _finish(session: Session, options: GenerateOptions, delivery: Delivery) -> None:
    """Print what remains to be printed: the end of the text or the object, and what is said about it."""
    from spd.cli.text.reply import early_end, reply_fields, stats_line, versions

    engine, request, reply = delivery.engine, delivery.request, delivery.reply
    fields = reply_fields(reply, delivery.metrics, engine, request, delivery.inside)
    if options.json:
        shown = {"schema": "spd.generate/1", "model": options.model, **fields}
        shown |= {"params": vars(request.params), "plan": engine.plan.as_dict(), "versions": versions()}
        delivery.sink.write(to_json(shown) + "\n")
    else:
        delivery.finish_text()
    if early := early_end(fields, reply.error, request):
        session.console.note(early)
    if options.stats:
        tell(stats_line(delivery.metrics))


def say_before(
    console: Console, options: GenerateOptions, settings: Settings, engine: Engine, request: Request
) -> None:
    """Notes about limits that the user may not expect, and the plan of a verbose run."""
    room, wanted = engine.plan.shape.ctx - len(request.prompt_ids), request.params.max_tokens
    if wanted is not None and wanted > room:
        console.note(f"the context leaves room for {room:,} tokens, fewer than -n {wanted:,}")
    say_plan(console, options, engine, settings)


def say_plan(console: Console, options: GenerateOptions, engine: Engine, settings: Settings) -> None:
    """Notes about what the plan makes of the options, and the plan of a verbose run."""
    from spd.cli.text.prompt import note_thinking

    plan = engine.plan
    note_thinking(console, options.think, settings.vocabulary)
    if plan.wishes.verify != "coupled" and plan.spec != "off":
        console.note(
            f"--verify {plan.wishes.verify}: texts are as likely as without speculation, not the same; "
            f"{plan.shape.draft_max} drafts a round"
        )
    if console.verbose:
        told = {"plan": plan.as_dict(), "params": settings.sampling.words()}
        for line in fact_lines(told | {"load": f"{engine.load_ms / 1000:.2f} s"}):
            console.detail(line)

"""`spd generate`: one prompt in, one reply out; what can be refused is refused before torch is imported."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from spd.cli.engine import load, say_before, say_load, say_notes
from spd.cli.options import GenerateOptions
from spd.cli.terminal.console import Session, tell
from spd.cli.terminal.sink import Sink, check_writable, to_json

if TYPE_CHECKING:
    from spd.runtime import Engine, Request, RoundRecord
    from spd.server.client import ServedEngine


def generate(session: Session, options: GenerateOptions) -> int:
    """Answer one prompt, for pipes and scripts; the text is the same with and without speculation.

    Examples:
      spd generate --stats "What does os.path.join do?"
      cat notes.md | spd generate -n 200 -s "Be terse" "Summarise"
    """
    from spd.cli.reply_view import Delivery
    from spd.cli.run_settings import check_conflicts, plan_settings
    from spd.conversation.prompt import render_prompt

    check_conflicts(options)  # and options are final from here on: a server gets them as they are
    for path in (options.output, options.trace):
        if path is not None:
            check_writable(path)
    sink = Sink.stdout() if options.output is None else Sink(options.output, append=options.resume)
    with closing(sink):
        if not (options.trace or options.dry_run or options.jsonl):
            from spd.cli.served import served_engine

            if (served := served_engine(session, options)) is not None:
                return _generate_served(session, options, sink, served)
        from spd.cli.commands.models import ensure_models

        ensure_models(session, options)
        if options.jsonl:
            from spd.cli.commands.jsonl import generate_lines

            return generate_lines(session, options, sink)
        from spd.cli.prompt_input import cut_named, gather
        from spd.conversation.settings import REQUEST_ID

        settings = plan_settings(options)
        asked = gather(options)
        with cut_named(options, asked, settings.context, lambda: settings.vocabulary.tokenizer):
            request, inside = settings.prepare(REQUEST_ID, asked)
        if options.dry_run:
            text = render_prompt(asked, settings.vocabulary, request.prompt_ids)
            _show_prompt(options, settings.context, text, request, sink)
            return 0
        engine = load(session.console, options.model, settings.config)
        if engine.plan.shape.ctx != settings.context:  # it may be less than the model's
            settings = dataclasses.replace(settings, context=engine.plan.shape.ctx)
            with cut_named(options, asked, settings.context, lambda: engine.tokenizer):
                request, inside = settings.prepare(REQUEST_ID, asked)
        say_before(session.console, settings, engine, request)
        if not (options.json or options.no_server):
            say_load(session.console, options.model, engine)
        marks = settings.vocabulary.marks
        delivery = Delivery(session, options, sink, engine, request, inside, marks)
        if options.trace is None:
            return delivery.run()
        with closing(Sink(options.trace)) as trace:
            _record(engine, options.model, request, trace)
            return delivery.run()


def _generate_served(
    session: Session, options: GenerateOptions, sink: Sink, engine: ServedEngine
) -> int:
    """Answer one prompt by a running server."""
    from spd.cli.prompt_input import cut_named, gather, read_grammar
    from spd.cli.reply_view import Delivery
    from spd.cli.run_settings import sampling_wishes

    wishes = sampling_wishes(options)
    asked = gather(options)
    with cut_named(options, asked, engine.info.ctx, lambda: engine.tokenizer):
        served = engine.prepare(asked, wishes, read_grammar(options), options.think)
    say_notes(session.console, served.notes, engine, served.parameters)
    delivery = Delivery(
        session, options, sink, engine, served.request, served.inside_thinking, served.marks
    )
    return delivery.run()


def _record(engine: Engine, model: str, request: Request, trace: Sink) -> None:
    """Write a line about the run, and one for each round from now on."""
    from spd.runtime.lab import TraceHeader

    def record(line: TraceHeader | RoundRecord) -> None:
        trace.write(to_json(dataclasses.asdict(line)) + "\n")

    record(TraceHeader(model, request.params.temperature, engine.plan.as_dict()))
    engine.trace = record


def _show_prompt(
    options: GenerateOptions, context: int, text: str, request: Request, sink: Sink
) -> None:
    """What --dry-run shows: the prompt as text on stdout, how many tokens it is on stderr."""
    ids = request.prompt_ids
    if not options.json:
        sink.write(text if text.endswith("\n") else text + "\n")
        tell(f"{len(ids):,} tokens of {context:,}")
        return
    shown = {"schema": "spd.prompt/1", "model": options.model, "prompt": text, "prompt_ids": ids}
    more = {"prompt_tokens": len(ids), "context": context, "params": vars(request.params)}
    sink.write(to_json(shown | more) + "\n")

"""`spd generate`: one prompt in, one reply out; options are checked before torch is imported."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from spd.cli.engine import load_engine, print_notes, print_run_notes
from spd.cli.options import GenerateOptions
from spd.cli.terminal.console import Session, write_stderr_line
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
    from spd.cli.run_settings import check_conflicts

    check_conflicts(options)  # options are final from here on: a server gets them as they are
    for path in (options.output, options.trace):
        if path is not None:
            check_writable(path)
    sink = Sink.stdout() if options.output is None else Sink(options.output, append=options.resume)
    with closing(sink):
        if not (options.trace or options.dry_run or options.jsonl):
            from spd.cli.served import served_engine

            served = served_engine(session, options)
            if served is not None:
                return _generate_served(session, options, sink, served)
        from spd.cli.commands.models import offer_downloads

        offer_downloads(session, options)
        if options.jsonl:
            from spd.cli.commands.jsonl import generate_lines

            return generate_lines(session, options, sink)
        return _generate_local(session, options, sink)


def _generate_local(session: Session, options: GenerateOptions, sink: Sink) -> int:
    """Answer one prompt with an engine of this process, or show the prompt with --dry-run.

    Returns the exit status. Writes the trace if one was asked for.
    """
    from spd.cli.prompt_input import read_prompt, suggest_cut
    from spd.cli.reply_view import GenerateRun
    from spd.cli.run_settings import plan_settings
    from spd.conversation.prompt import render_prompt
    from spd.conversation.settings import REQUEST_ID

    settings = plan_settings(options)
    prompt = read_prompt(options, settings.context)
    with suggest_cut(options, prompt, settings.context, lambda: settings.vocabulary.tokenizer):
        request, inside_thinking = settings.prepare_request(REQUEST_ID, prompt)
    if options.dry_run:
        text = render_prompt(prompt, settings.vocabulary, request.prompt_ids)
        _write_prompt(
            options=options, context=settings.context, text=text, request=request, sink=sink
        )
        return 0
    engine = load_engine(
        session,
        options.model,
        settings.config,
        recommends_server=not (options.json or options.no_server),
    )
    if engine.plan.shape.ctx != settings.context:  # memory may allow less than the model does
        settings = dataclasses.replace(settings, context=engine.plan.shape.ctx)
        with suggest_cut(options, prompt, settings.context, lambda: engine.tokenizer):
            request, inside_thinking = settings.prepare_request(REQUEST_ID, prompt)
    print_run_notes(session.console, settings, engine, request)
    marks = settings.vocabulary.marks
    run = GenerateRun(
        session=session,
        options=options,
        sink=sink,
        engine=engine,
        request=request,
        inside_thinking=inside_thinking,
        marks=marks,
    )
    if options.trace is None:
        return run.run()
    with closing(Sink(options.trace)) as trace:
        _record_trace(engine, options.model, request, trace)
        return run.run()


def _generate_served(
    session: Session, options: GenerateOptions, sink: Sink, engine: ServedEngine
) -> int:
    """Answer one prompt with the engine of a running server; return the exit status."""
    from spd.cli.prompt_input import read_grammar, read_prompt, suggest_cut
    from spd.cli.reply_view import GenerateRun
    from spd.cli.run_settings import requested_sampling

    sampling = requested_sampling(options)
    prompt = read_prompt(options, engine.info.ctx)
    with suggest_cut(options, prompt, engine.info.ctx, lambda: engine.tokenizer):
        served = engine.prepare_request(prompt, sampling, read_grammar(options), options.think)
    print_notes(session.console, served.notes, engine, served.parameters)
    run = GenerateRun(
        session=session,
        options=options,
        sink=sink,
        engine=engine,
        request=served.request,
        inside_thinking=served.inside_thinking,
        marks=served.marks,
    )
    return run.run()


def _record_trace(engine: Engine, model: str, request: Request, trace: Sink) -> None:
    """Write a line about the run to a trace, and make the engine write one for each later round."""
    from spd.runtime.lab import TraceHeader

    def write_record(line: TraceHeader | RoundRecord) -> None:
        """Write a line of the trace as JSON."""
        trace.write(to_json(dataclasses.asdict(line)) + "\n")

    write_record(TraceHeader(model, request.params.temperature, engine.plan.as_dict()))
    engine.trace = write_record


def _write_prompt(
    options: GenerateOptions, context: int, text: str, request: Request, sink: Sink
) -> None:
    """Write the output of --dry-run: prompt on stdout and token count on stderr, or JSON."""
    ids = request.prompt_ids
    if not options.json:
        sink.write(text if text.endswith("\n") else text + "\n")
        write_stderr_line(f"{len(ids):,} tokens of {context:,}")
        return
    result = {"schema": "spd.prompt/1", "model": options.model, "prompt": text, "prompt_ids": ids}
    details = {"prompt_tokens": len(ids), "context": context, "params": vars(request.params)}
    sink.write(to_json(result | details) + "\n")

"""`spd generate`: one prompt in, one reply out; what can be refused is refused before torch is imported."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from spd.cli.options import GenerateOptions
from spd.cli.text.output import (
    Console,
    Session,
    Sink,
    check_writable,
    fact_lines,
    loading,
    tell,
    to_json,
)

if TYPE_CHECKING:
    from spd.cli.text.job import Settings
    from spd.runtime import Engine, EngineConfig, Request

REQUEST_ID = "0"


def generate(session: Session, options: GenerateOptions) -> int:
    """Answer one prompt, for pipes and scripts; the text is the same with and without speculation.

    Examples:
      spd generate --stats "What does os.path.join do?"
      cat notes.md | spd generate -s "Be terse" "Summarise"
    """
    from spd.cli.text.job import check_conflicts, plan_settings, render_asked
    from spd.cli.text.reply import Delivery

    check_conflicts(options)  # and options are final from here on: a server gets them as they are
    for path in (options.output, options.trace):
        if path is not None:
            check_writable(path)
    sink = Sink.stdout() if options.output is None else Sink(options.output, append=options.resume)
    with closing(sink):
        if not (options.trace or options.dry_run or options.jsonl):
            from spd.cli.serve.local import served_engine

            if (served := served_engine(session, options)) is not None:
                request, inside, marks = served.prepare(session.console, options)
                return Delivery(session, options, sink, served, request, inside, marks).run()
        from spd.cli.commands.models import ensure_models

        ensure_models(session, options)
        if options.jsonl:
            from spd.cli.commands.jsonl import generate_lines

            return generate_lines(session, options, sink)
        from spd.cli.text.prompt import gather

        settings, asked = plan_settings(options), gather(options)
        request, inside = settings.request(REQUEST_ID, asked)
        if options.dry_run:
            text = render_asked(asked, settings.vocabulary, request.prompt_ids)
            _show_prompt(options, settings.context, text, request, sink)
            return 0
        engine = load(session.console, options.model, settings.config)
        if engine.plan.shape.ctx != settings.context:  # it may be less than the model's
            settings = dataclasses.replace(settings, context=engine.plan.shape.ctx)
            request, inside = settings.request(REQUEST_ID, asked)
        say_before(session.console, options, settings, engine, request)
        marks = settings.vocabulary.marks
        return Delivery(session, options, sink, engine, request, inside, marks).run()


def load(console: Console, name: str, config: EngineConfig) -> Engine:
    """An engine, with words on a terminal while it loads."""
    with loading(f"loading {name}", console) as progress:
        from spd.runtime import Engine

        return Engine(config, progress=progress)


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


def say_before(
    console: Console,
    options: GenerateOptions,
    settings: Settings,
    engine: Engine,
    request: Request | None,
) -> None:
    """Notes about what the user may not expect, of the one request too, and the plan of a verbose run."""
    from spd.cli.text.prompt import note_thinking

    plan = engine.plan
    if request is not None and (wanted := request.params.max_tokens) is not None:
        room = plan.shape.ctx - len(request.prompt_ids)
        if wanted > room:
            console.note(f"the context leaves room for {room:,} tokens, fewer than -n {wanted:,}")
    if "no C compiler" in plan.kernels_reason:
        console.note(f"this is slow: {plan.kernels_reason}")
    note_thinking(console, options.think, settings.vocabulary)
    if plan.wishes.verify != "coupled" and plan.spec != "off":
        words = "texts are as likely as without speculation, not the same"
        console.note(
            f"--verify {plan.wishes.verify}: {words}; {plan.shape.draft_max} drafts a round"
        )
    if console.verbose:
        told = {"plan": plan.as_dict(), "params": settings.sampling.words()}
        for line in fact_lines(told | {"load": f"{engine.load_ms / 1000:.2f} s"}):
            console.detail(line)

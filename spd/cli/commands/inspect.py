"""`spd inspect`: describes a model and the memory of a run from headers and JSON, without torch."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.options import JsonOptions, ModelArgument, output_option, same_as_argument
from spd.cli.terminal.console import Session
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.tables import Size
from spd.errors import SpdError
from spd.runtime.plan.config import METHODS, QUANTIZE, EngineConfig

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder
    from spd.formats.model_config import ModelConfig
    from spd.runtime import Drafter, EnginePlan
    from spd.runtime.plan.memory import EngineShape

CONTEXTS = (4096, 16384, 32768, 65536, 131072)
"""Context lengths whose memory is reported, up to the model's maximum."""
Facts = dict[str, Any]
"""An object of the JSON output."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InspectOptions(ModelArgument, JsonOptions):
    """The options of `spd inspect`."""

    model: str = same_as_argument("demo", envvar="SPD_MODEL")
    draft: str | None = output_option(
        None, "MODEL", "Check it as a draft model or head.", "--draft", "--draft-model"
    )
    quantize: Literal["none", "int8", "int4"] = output_option(
        "none", "FORM", "Count with --quantize int8 or int4."
    )
    tp: int = output_option(1, "N", "Show the memory of one of N ranks.")


def inspect(session: Session, options: InspectOptions) -> None:
    """Show what a model is and needs, and whether a draft model fits it; loads no weights.

    Examples:
      spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --json
    """
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import is_mtp_head

    sink = Sink.stdout()
    draft = None
    name = options.model
    folder = ModelFolder.resolve(name)
    # Templates render in another process, which starts meanwhile.
    threading.Thread(target=template_state, args=(folder,), daemon=True).start()
    target = describe_model(name, folder)
    result: Facts = {"schema": "spd.inspect/1", "target": target}
    if options.draft is not None:
        draft = ModelFolder.resolve(options.draft)
        if not is_mtp_head(draft):  # its configuration is the target's
            result["draft"] = describe_model(options.draft, draft)
    choice = _choose_drafter(folder, draft)
    refusal = None
    if draft is not None:
        refusal = choice if isinstance(choice, SpdError) else None
        result["compatible"] = refusal is None
        reader = draft.config.stream_reader if "draft" in result else None
        if reader is not None and refusal is None:
            result["draft"]["head"]["aux_layers"] = reader.aux_layers(target["layers"])
    if target["head"] is None:  # a head cannot run without a target
        result["speculation"] = speculation_facts(choice, folder, draft)
        config = EngineConfig(
            model=folder, draft_model=draft, quantize=options.quantize, tp=options.tp
        )
        result["needs"] = memory_needs(config, choice)
    target["template"] = template_state(folder)
    if draft is not None and "draft" in result:
        result["draft"]["template"] = template_state(draft)
    if refusal is None or not options.json:  # else the one object on standard output is the error's
        sink.write_result(options.json, result)
    if refusal is not None:
        raise refusal


def describe_model(name: str, folder: ModelFolder) -> Facts:
    """Return the JSON object of one model folder, whose headers and small files are read.

    "template" is None in it, to be set later. Raises CheckpointError.
    """
    from spd.runtime import unused_tensors
    from spd.runtime.plan.memory import position_bytes, state_bytes

    config = folder.config  # before the weights: a folder that is no model fails here first
    checkpoint = folder.checkpoint
    tokenizer = folder.tokenizer
    return {
        "model": name,
        "folder": str(folder),
        "architecture": config.architecture,
        "parameters": sum(prod(meta.shape) for meta in checkpoint.tensors.values()),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_positions": config.max_positions,
        "rope": config.rope.kind,
        "tied_embeddings": config.tie_embeddings,
        "dtype": config.dtype,
        "stored_dtypes": sorted({meta.dtype for meta in checkpoint.tensors.values()}),
        "weight_bytes": Size(checkpoint.total_bytes),
        "tensors": len(checkpoint.tensors),
        "shards": len(checkpoint.shards),
        "unexpected_tensors": unused_tensors(config, checkpoint),
        "gguf": None if folder.gguf is None else folder.gguf.describe(),
        "mtp": mtp_facts(folder),
        "head": head_facts(config),
        "kv_bytes_per_token": Size(position_bytes(config, config.dtype)),
        "kv_int8_bytes_per_token": Size(position_bytes(config, "int8")),
        "state_bytes_per_slot": Size(state_bytes(config)),
        "vocabulary": {
            "size": config.vocab_size,
            "used": None if tokenizer is None else tokenizer.vocab_size,
            "sha256": None if tokenizer is None else tokenizer.fingerprint,
        },
        "template": None,  # set last, as rendering takes longest
        "notes": list(checkpoint.notes),
    }


def mtp_facts(folder: ModelFolder) -> Facts | None:
    """Return the JSON object of the checkpoint's MTP head, which may be declared and absent.

    None if there is none and none is declared.
    """
    from spd.formats.mtp import declared_module_count, find_mtp_source
    from spd.runtime import DTYPE_BYTES, check_mtp_source, module_position_elements

    declared = declared_module_count(folder.fields)
    source = find_mtp_source(folder)
    if source is None:
        return (
            {"family": None, "modules": 0, "declared": declared, "error": None}
            if declared
            else None
        )
    checkpoint = folder.checkpoint
    layout = source.layout
    error = None
    try:
        check_mtp_source(source, checkpoint)
    except SpdError as refusal:
        error = refusal.message
    per_token = layout.modules * module_position_elements(folder.config, layout.family)
    return {
        "family": layout.family.name,
        "layout": layout.description,
        "modules": layout.modules,
        "declared": declared,
        "weight_bytes": Size(
            sum(
                checkpoint.tensors[name].nbytes
                for name in filter(layout.contains, checkpoint.tensors)
            )
        ),
        "kv_bytes_per_token": Size(per_token * DTYPE_BYTES[folder.config.dtype]),
        "error": error,
    }


def head_facts(config: ModelConfig) -> Facts | None:
    """Return the JSON object of an EAGLE-3 head, an assistant or a block drafter; None for a model."""
    reader = config.stream_reader
    facts = reader or config.assistant
    if facts is None:
        return None
    head: Facts = {
        "kind": config.head_kind,
        "target_hidden_size": facts.target_hidden_size,
        "draft_vocab_size": config.vocab_size if reader is None else reader.draft_vocab_size,
        "aux_layers": reader and reader.configured_layers,
    }
    if config.block is not None:
        head["block_size"] = config.block.block_size
    return head


def template_state(folder: ModelFolder) -> str:
    """Render a message by the chat template, and return as text if it did so; else why not."""
    try:
        if folder.template is None:
            return "none: use --raw"
        folder.template.render(({"role": "user", "content": "Hello"},))
    except SpdError as error:
        return f"does not render: {error.message}"
    return "renders"


def _choose_drafter(
    folder: ModelFolder, draft: ModelFolder | None, method: str = "auto"
) -> Drafter | SpdError:
    """Return the drafter of a method as small files and headers determine it, or its error."""
    from spd.runtime import choose_drafter

    try:
        return choose_drafter(EngineConfig(model=folder, draft_model=draft, spec=method), folder)
    except SpdError as error:
        return error


def speculation_facts(
    choice: Drafter | SpdError, folder: ModelFolder, draft: ModelFolder | None
) -> Facts:
    """Return the JSON object of the drafter that was chosen, and whether each method has one.

    choice: the drafter of `--spec auto`, or the error that takes its place. `draft_max` is the
    drafter's own default. Each method but auto and off is tried, with `draft` where it takes one;
    with `draft` the reason is that it was given.
    """
    facts: Facts = {"method": None, "reason": None, "draft_max": None, "methods": {}}
    if isinstance(choice, SpdError):
        facts["reason"] = choice.message
    else:
        reason = choice.reason if draft is None else "it is given with --draft"
        facts |= {
            "method": choice.method,
            "reason": reason,
            "draft_max": choice.draft_max,
        }
    from spd.runtime import takes_draft_model

    for name in METHODS:
        if name not in ("auto", "off"):
            is_taken = draft is not None and takes_draft_model(name, draft)
            method_draft = draft if is_taken else None
            attempt = _choose_drafter(folder, method_draft, name)
            refusal = attempt.message if isinstance(attempt, SpdError) else None
            facts["methods"][name] = {"possible": refusal is None, "why": refusal}
    return facts


def quantized_forms(config: EngineConfig, plan: EnginePlan) -> list[Facts]:
    """Return for each value of --quantize the bytes of the weights and the longest context.

    Values that the model or its drafter cannot have are left out.
    """
    from spd.runtime import longest_context, machine_from_driver, resolve_plan
    from spd.runtime.plan.memory import measure_memory

    forms = []
    usable = plan.memory_budget_bytes
    for name in QUANTIZE:
        with suppress(SpdError):  # such weights, or such a drafter, cannot be rounded
            form_plan = plan
            if name != config.quantize:
                form_plan = resolve_plan(replace(config, quantize=name), machine_from_driver())
            shape = form_plan.shape
            facts = {
                "weights": Size(measure_memory(shape).weights),
                "ctx": longest_context(shape, usable),
            }
            forms.append({"quantize": name, **facts})
    return forms


def memory_needs(config: EngineConfig, choice: Drafter | SpdError) -> Facts:
    """Return the JSON object of the memory of one request, at the planned and at several contexts.

    It is without the drafter if that cannot run.
    """
    from spd.runtime import (
        draft_context,
        fit_to_memory,
        machine_from_driver,
        resolve_plan,
        with_context,
    )
    from spd.runtime.plan.memory import measure_memory, snapshot_nbytes

    machine = machine_from_driver()
    if isinstance(choice, SpdError):
        config = replace(config, draft_model=None)
    plan = resolve_plan(config, machine)
    full_shape = plan.shape
    free = machine.free_bytes // machine.count_sharing_ranks(plan.shape.tp)
    try:
        shape = fit_to_memory(full_shape, config, machine.device, free)
        fits = True
    except SpdError:
        shape = full_shape
        fits = False
    usage = measure_memory(shape)
    usable = plan.memory_budget_bytes
    max_positions = full_shape.target.max_positions
    contexts = []
    for ctx in sorted({shape.ctx, max_positions, *(n for n in CONTEXTS if n < max_positions)}):
        # The drafter's context is as long as the target's, or as its model allows.
        unlimited = replace(full_shape, draft_ctx=draft_context(full_shape.draft, ctx))
        contexts.append(context_facts(with_context(unlimited, ctx), usable))
    return {
        "ctx": shape.ctx,
        "total": Size(usage.total),
        "parts": {name: Size(size) for name, size in vars(usage).items()},
        "checkpoint_bytes": Size(
            shape.num_snapshots * snapshot_nbytes(shape) if shape.num_snapshots else 0
        ),
        "device": plan.device,
        "dtype": shape.dtype,
        "weights": plan.weights,
        "weights_reason": plan.weights_reason,
        "free": Size(free),
        "tp": shape.tp,
        "draft_tp": shape.draft_tp,
        "draft_tp_reason": plan.draft_tp_reason,
        "usable": Size(usable),
        "fits": fits,
        "forms": quantized_forms(config, plan),
        "contexts": contexts,
    }


def context_facts(shape: EngineShape, usable: int) -> Facts:
    """Return the bytes of a shape as it is and with --kv int8, and if they fit `usable` bytes."""
    from spd.runtime.plan.memory import measure_memory

    total = measure_memory(shape).total
    facts: Facts = {"ctx": shape.ctx, "total": Size(total), "fits": total <= usable}
    rounded = measure_memory(replace(shape, rounds_cache=True)).total
    return facts | {"total_kv_int8": Size(rounded), "fits_kv_int8": rounded <= usable}

"""`spd inspect`: what a model folder holds, whether a draft model fits it, and what a run would do and need.

Reads headers and JSON only, by the rules and sums of the plan: torch is never imported, weights are never
touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from spd.cli.options import CommonOptions, Session, argument, model_names, printed
from spd.cli.text.output import Sink, to_json
from spd.errors import IncompatibleError, SpdError
from spd.runtime.plan.config import METHODS, EngineConfig

if TYPE_CHECKING:
    from spd.formats.checkpoint import Checkpoint
    from spd.formats.folder import ModelFolder
    from spd.formats.model_config import ModelConfig
    from spd.runtime import Drafter

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PROBE = ({"role": "user", "content": "Hello"},)
MAX_LISTED = 8


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class InspectOptions(CommonOptions):
    """Everything `spd inspect` takes."""

    model: str = argument(
        "MODEL",
        "A folder, org/name, demo or demo-hybrid.",
        "demo",
        envvar="SPD_MODEL",
        autocompletion=model_names,
    )
    draft: str | None = printed(
        None, "MODEL", "Check it as a draft model.", "--draft", "--draft-model", autocompletion=model_names
    )
    revision: str | None = printed(None, "REV", "Branch, tag or commit in the cache.")
    quantize: Literal["none", "int8", "int4"] = printed(
        "none", "FORM", "Count what it needs with --quantize int8 or int4."
    )
    tp: int = printed(1, "N", "Tell the memory of one of N ranks.")
    draft_tp: int | None = printed(None, "N", "Ranks that share the drafter.")
    json: bool = printed(False, None, "One JSON object.")


def inspect(session: Session, options: InspectOptions) -> None:
    """Show what a model is and needs, and whether a draft model fits it; loads no weights."""
    from spd.formats.folder import ModelFolder

    sink = Sink.stdout()
    refusal, draft = None, None
    folder = ModelFolder.named(options.model, options.revision)
    target = describe(options.model, folder)
    shown: dict[str, Any] = {"schema": "spd.inspect/1", "target": target}
    if options.draft is not None:
        draft = ModelFolder.named(options.draft)
        shown["draft"] = describe(options.draft, draft)
        refusal, head = unfit(folder, target, draft, shown["draft"]), draft.config.eagle3
        shown["compatible"] = refusal is None
        if head is not None and refusal is None:
            shown["draft"]["eagle3"]["aux_layers"] = head.aux_layers(target["layers"])
    if target["eagle3"] is None:  # a head by itself runs nothing
        choice = choose(folder, draft, options.quantize, options.tp, options.draft_tp)
        shown |= {"speculation": speculation(choice), "needs": needs(choice)}
    if options.json:
        if refusal is None:  # else the one object on standard output is the error's
            sink.write(to_json(shown) + "\n")
    else:
        sink.write_lines(inspect_lines(shown))
    for note in target["notes"]:
        session.console.detail(f"note    {note}")
    if refusal is not None:
        raise refusal


def describe(name: str, folder: ModelFolder) -> dict[str, Any]:
    """Every fact about one model folder, as JSON values. Raises CheckpointError."""
    from spd.runtime.plan.memory import state_bytes

    config = folder.config  # before the weights: what is no model folder at all lacks this first
    checkpoint = folder.checkpoint
    dtypes = sorted({meta.dtype for meta in checkpoint.tensors.values()})
    unexpected = check_names(checkpoint, config)
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
        "stored_dtypes": dtypes,
        "weight_bytes": checkpoint.total_bytes,
        "tensors": len(checkpoint.tensors),
        "shards": len(checkpoint.shards),
        "unexpected_tensors": unexpected,
        "mtp": mtp_facts(folder),
        "eagle3": eagle3_facts(config, checkpoint),
        "kv_bytes_per_token": kv_bytes(config),
        "state_bytes_per_slot": state_bytes(config),
        "vocabulary": vocabulary_facts(folder),
        "template": template_facts(folder),
        "notes": list(checkpoint.notes),
    }


def check_names(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """Names that the architecture does not use. Raises one CheckpointError for all that it lacks."""
    from spd.runtime import check_eagle3, check_weights, family_layout

    unused: list[str]
    if config.eagle3 is not None:
        unused = check_eagle3(config, checkpoint)
    else:
        unused = check_weights(checkpoint, config, family_layout(config))
    return unused


def mtp_facts(folder: ModelFolder) -> dict[str, Any] | None:
    """The MTP head that the checkpoint holds, or lost; None where nothing speaks of one."""
    from spd.formats.mtp import declared_modules
    from spd.runtime import check_source, module_position_size

    declared, source = declared_modules(folder.fields), folder.mtp_source()
    if source is None:
        return {"family": None, "modules": 0, "declared": declared, "error": None} if declared else None
    config, checkpoint, layout, error = folder.config, folder.checkpoint, source.layout, None
    try:
        check_source(source, checkpoint)
    except SpdError as refusal:
        error = refusal.message
    tensors = [meta for name, meta in checkpoint.tensors.items() if layout.owns(name)]
    per_token = layout.modules * module_position_size(config, layout.family)
    return {
        "family": layout.family.name,
        "layout": layout.words(),
        "modules": layout.modules,
        "declared": declared,
        "prefix": layout.layer_prefix(0),
        "tensors": len(tensors),
        "weight_bytes": sum(meta.nbytes for meta in tensors),
        "kv_bytes_per_token": per_token * DTYPE_BYTES[config.dtype],
        "concat": ["hidden", "embedding"] if layout.family.hidden_first else ["embedding", "hidden"],
        "recycles": "normed" if layout.family.recycles_normed else "raw",
        "error": error,
    }


def eagle3_facts(config: ModelConfig, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """How an EAGLE-3 head reads its target; None for a model."""
    from spd.formats.eagle3 import EMBEDDING
    from spd.runtime import shares_head

    head = config.eagle3
    if head is None:
        return None
    return {
        "target_hidden_size": head.target_hidden_size,
        "draft_vocab_size": head.draft_vocab_size or config.vocab_size,
        "aux_layers": head.listed_layers,
        "recycles": "normed" if head.norm_output else "raw",
        "norms": [
            name for name in ("norm_before_residual", "norm_before_fc", "fc_norm") if getattr(head, name)
        ],
        "own_embedding": EMBEDDING in checkpoint.tensors,
        "own_head": not shares_head(config, checkpoint),
    }


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of keys and values that one token adds, in the dtype of the weights."""
    from spd.runtime.plan.memory import position_size

    return position_size(config) * DTYPE_BYTES[config.dtype]


def vocabulary_facts(folder: ModelFolder) -> dict[str, Any]:
    """Rows of the embedding, ids that the tokenizer uses, and the fingerprint that pairs are checked by."""
    facts: dict[str, Any] = {"size": folder.config.vocab_size, "used": None, "sha256": None}
    if folder.tokenizer is not None:
        facts |= {"used": folder.tokenizer.vocab_size, "sha256": folder.tokenizer.fingerprint()}
    return facts


def template_facts(folder: ModelFolder) -> dict[str, Any]:
    """Whether there is a chat template, and whether it renders a greeting."""
    try:
        template = folder.template
        if template is None:
            return {"present": False, "renders": None, "error": None}
        template.render(PROBE)
    except SpdError as error:
        return {"present": True, "renders": False, "error": error.message}
    return {"present": True, "renders": True, "error": None}


def mismatch(target: dict[str, Any], draft: dict[str, Any]) -> IncompatibleError | None:
    """The refusal of a pair whose tokenizers differ in any id; None if they agree."""
    ours, theirs = target["vocabulary"], draft["vocabulary"]
    if ours["sha256"] is not None and ours["sha256"] == theirs["sha256"]:
        return None
    if ours["sha256"] is None and theirs["sha256"] is None:
        return None
    sides = []
    for role, model in (("target", target), ("draft", draft)):
        digest = model["vocabulary"]["sha256"]
        words = f"sha256 {digest[:16]}" if digest else "no tokenizer.json"
        sides.append(f"{role:<6} {model['model']}  {model['vocabulary']['size']:,} ids  {words}")
    return IncompatibleError(
        "draft model does not share the target's vocabulary",
        reason=[*sides, "A draft's token ids would mean other text, so spd does not run this pair."],
        fix=["a draft model with the same tokenizer.json", "--spec ngram needs no draft model"],
        code="vocab_mismatch",
    )


def unfit(
    folder: ModelFolder, target: dict[str, Any], draft: ModelFolder, drafter: dict[str, Any]
) -> SpdError | None:
    """A pair's refusal: a head's by what it was made for, a model's by its tokenizer; None if it fits."""
    from spd.runtime import check_target

    if draft.config.eagle3 is None:
        return mismatch(target, drafter)
    try:
        check_target(draft.config, draft.path, folder.config, folder.path)
    except SpdError as error:
        return error
    return mismatch(target, drafter) if drafter["vocabulary"]["sha256"] else None


def inspect_lines(shown: dict[str, Any]) -> list[str]:
    """The facts as aligned lines for people."""
    target = shown["target"]
    kind = "MHA" if target["kv_heads"] == target["heads"] else "GQA"
    shape = (
        f"{target['layers']} layers",
        f"hidden {target['hidden_size']:,}",
        f"{kind} {target['heads']}/{target['kv_heads']}",
        f"head {target['head_dim']}",
        f"rope {target['rope']}",
        f"ctx {target['max_positions']:,}",
    )
    weights = (
        f"{target['dtype']} (stored {', '.join(target['stored_dtypes'])})",
        _size(target["weight_bytes"]),
        f"{target['tensors']:,} tensors in {_plural(target['shards'], 'shard')}",
    )
    lines = [
        f"target    {_headline(target)}",
        f"shape     {' · '.join(shape)}",
        f"weights   {' · '.join(weights)}",
        *_tensor_lines(target),
        *_mtp_lines(target["mtp"]),
        *_eagle3_lines(target["eagle3"]),
        f"vocab     {_vocabulary_words(target['vocabulary'])}",
        f"template  {_template_words(target['template'])}",
        f"memory    {_memory_words(target)}",
    ]
    draft = shown.get("draft")
    if draft is not None:
        words = _pair_words(target["vocabulary"], draft["vocabulary"], shown["compatible"])
        if draft["eagle3"] is not None:
            words = "made for this target" if shown["compatible"] else "made for another target"
        lines += [f"draft     {_headline(draft)}", f"          {_memory_words(draft)}"]
        lines += [*_eagle3_lines(draft["eagle3"]), f"pair      {words}"]
    if "needs" not in shown:
        return [*lines, "use       -m TARGET --draft-model " + target["model"]]
    return [*lines, *speculation_lines(shown["speculation"]), *need_lines(shown["needs"])]


def _pair_words(ours: dict[str, Any], theirs: dict[str, Any], compatible: bool) -> str:
    """What the comparison by hash came to."""
    if ours["sha256"] is None and theirs["sha256"] is None:
        return "no tokenizer.json on either side: --prompt-ids only"
    digests = [facts["sha256"][:16] if facts["sha256"] else "no tokenizer.json" for facts in (ours, theirs)]
    if compatible:
        return f"same vocabulary (sha256 {digests[0]} on both sides)"
    return f"another vocabulary: this pair cannot run ({digests[0]} and {digests[1]})"


def _headline(model: dict[str, Any]) -> str:
    return f"{model['model']} · {model['architecture']} · {_count(model['parameters'])} params"


def _memory_words(model: dict[str, Any]) -> str:
    words = (
        f"{_size(model['weight_bytes'])} weights + {_size(model['kv_bytes_per_token'])} a token of context"
    )
    states = model["state_bytes_per_slot"]
    return words if not states else f"{words} + {_size(states)} of states a request"


def _vocabulary_words(vocabulary: dict[str, Any]) -> str:
    if not vocabulary["sha256"]:
        return f"{vocabulary['size']:,} · no tokenizer.json: --prompt-ids only"
    return f"{vocabulary['size']:,} ({vocabulary['used']:,} used) · sha256 {vocabulary['sha256'][:16]}"


def _tensor_lines(target: dict[str, Any]) -> list[str]:
    unexpected = target["unexpected_tensors"]
    others = "no others"
    if unexpected:
        listed = ", ".join(unexpected[:MAX_LISTED]) + (", …" if len(unexpected) > MAX_LISTED else "")
        others = f"and {len(unexpected)} that are not used: {listed}"
    return [f"tensors   all that the architecture needs, {others}"]


def _mtp_lines(mtp: dict[str, Any] | None) -> list[str]:
    if mtp is None:
        return []
    if mtp["family"] is None:
        return [f"mtp       {mtp['declared']} modules in config.json, none in the weights: see --mtp HEAD"]
    size = f"{_size(mtp['weight_bytes'])} · {_size(mtp['kv_bytes_per_token'])} a token of context"
    unusable = f" · cannot be used: {mtp['error']}" if mtp["error"] else ""
    return [f"mtp       {mtp['layout']} · {size}{unusable}"]


def _eagle3_lines(eagle3: dict[str, Any] | None) -> list[str]:
    if eagle3 is None:
        return []
    layers = eagle3["aux_layers"]
    behind = "2, half and all but 3" if layers is None else ", ".join(map(str, layers))
    facts = (
        f"for a target of hidden {eagle3['target_hidden_size']:,}",
        f"reads it behind {behind} layers",
        f"drafts {eagle3['draft_vocab_size']:,} ids",
        *eagle3["norms"],
        *(["recycles normed"] if eagle3["recycles"] == "normed" else []),
    )
    return [f"eagle3    {' · '.join(facts)}"]


def _template_words(template: dict[str, Any]) -> str:
    if not template["present"]:
        return "none: use --raw"
    return "renders" if template["renders"] else f"does not render: {template['error']}"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _size(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"


def _plural(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


MARGIN = " " * 10
CONTEXTS = (4096, 16384, 32768, 65536, 131072)
"""Lengths whose memory is told, as far as the model goes."""


@dataclass(frozen=True)
class Choice:
    """What `--spec auto` comes to; without a drafter the run would be refused, for `error`."""

    config: EngineConfig
    folder: ModelFolder
    drafter: Drafter | None
    error: str | None
    others: Mapping[str, str | None]
    """Every method that can be asked for: None where it would run, else why it would not."""


def choose(
    folder: ModelFolder,
    draft: ModelFolder | None,
    quantize: str = "none",
    tp: int = 1,
    draft_tp: int | None = None,
) -> Choice:
    """What `auto` takes, and what the other methods would say. Reads small files and the draft's headers."""
    config = EngineConfig(model=folder, draft_model=draft, quantize=quantize, tp=tp, draft_tp=draft_tp)
    drafter, error = _try(folder, draft, "auto")
    taken = None if drafter is None else drafter.method
    others = {
        name: None if name == taken else _obstacle(folder, draft, name)
        for name in METHODS
        if name not in ("auto", "off")
    }
    return Choice(config, folder, drafter, error, others)


def _try(folder: ModelFolder, draft: ModelFolder | None, method: str) -> tuple[Drafter | None, str | None]:
    from spd.runtime import choose_drafter

    try:
        config = EngineConfig(model=folder, draft_model=draft, spec=method)
        return choose_drafter(config, folder), None
    except SpdError as error:
        return None, error.message


def _obstacle(folder: ModelFolder, draft: ModelFolder | None, method: str) -> str | None:
    """Why a method would not run, neither with the draft model that is given nor without one."""
    found, error = _try(folder, draft, method)
    if found is None and draft is not None:
        found, _ = _try(folder, None, method)
    return None if found is not None else error


def speculation(choice: Choice) -> dict[str, Any]:
    """What would be used, as JSON values."""
    drafter = choice.drafter
    given = choice.config.draft_model is not None
    return {
        "method": None if drafter is None else drafter.method,
        "reason": choice.error
        if drafter is None
        else "it is given with --draft"
        if given
        else drafter.reason,
        "draft_max": None if drafter is None else METHODS[drafter.method].draft_max,
        "methods": {name: {"possible": why is None, "why": why} for name, why in choice.others.items()},
    }


def needs(choice: Choice) -> dict[str, Any]:
    """Bytes that a run with one request and no flags takes here, part by part, and at other contexts.

    Where a pair cannot run, of the target with whatever it would choose alone.
    """
    from spd.runtime import drafts_up_to, foreseen_machine, outline
    from spd.runtime.plan.memory import at_context, checkpoint_bytes, fitted, measure

    machine, config = foreseen_machine(), choice.config
    if choice.drafter is None:
        config = replace(config, draft_model=None)
    if choice.drafter is None or choice.drafter.source() is None:
        config = replace(config, draft_tp=None)
    plan = outline(config, machine)
    whole, free = plan.shape, machine.free // machine.beside(plan.shape.tp)
    try:
        shape, fits = fitted(whole, config, machine.device, free), True
    except SpdError:
        shape, fits = whole, False
    need, usable, most = measure(shape), plan.memory_budget_bytes, whole.target.max_positions
    contexts = sorted({shape.ctx, most, *(n for n in CONTEXTS if n < most)})
    totals = {}
    for ctx in contexts:  # with a drafter that goes as far as the context, or as its own model does
        unlimited = replace(whole, draft_ctx=drafts_up_to(whole.draft, ctx))
        totals[ctx] = measure(at_context(unlimited, ctx)).total
    return {
        "ctx": shape.ctx,
        "total": need.total,
        "parts": vars(need),
        "checkpoint_bytes": shape.checkpoints * checkpoint_bytes(shape) if shape.checkpoints else 0,
        "device": plan.device,
        "dtype": shape.dtype,
        "weights": plan.weights,
        "weights_reason": plan.weights_reason,
        "free": free,
        "tp": shape.tp,
        "draft_tp": shape.draft_tp,
        "draft_tp_reason": plan.draft_tp_reason,
        "usable": usable,
        "fits": fits,
        "contexts": [{"ctx": n, "total": size, "fits": size <= usable} for n, size in totals.items()],
    }


def speculation_lines(found: Mapping[str, Any]) -> list[str]:
    """What would propose tokens and why, and what else could."""
    if found["method"] is None:
        text = f"none: a run with this draft model is refused ({found['reason']})"
    else:
        text = f"{found['method']}, up to {found['draft_max']} a round: {found['reason']}"
    could = [name for name, how in found["methods"].items() if how["possible"] and name != found["method"]]
    lines = [f"spec      auto takes {text}"]
    if could:
        lines.append(f"{MARGIN}also possible: {', '.join(could)}")
    blocked = {name: how["why"] for name, how in found["methods"].items() if not how["possible"]}
    return [*lines, *(f"{MARGIN}not {name}: {why}" for name, why in blocked.items())]


def need_lines(need: Mapping[str, Any]) -> list[str]:
    """The memory of a run, whether it is there, and that of other contexts."""
    from spd.runtime import AS_STORED
    from spd.runtime.plan.memory import show_size

    parts = " + ".join(
        f"{show_size(size)} {name.replace('_', ' ')}" for name, size in need["parts"].items() if size
    )
    kept = (
        ""
        if need["weights_reason"] == AS_STORED
        else f", weights {need['weights']} ({need['weights_reason']})"
    )
    words = f"{show_size(need['total'])} for {need['ctx']:,} tokens in {need['dtype']}{kept}: {parts}"
    if need["tp"] > 1:
        words = f"on each of {need['tp']} ranks {words}"
    known = need["free"] < 2**62
    there = (
        f"{show_size(need['usable'])} of the {show_size(need['free'])} free on {need['device']} may be used"
    )
    verdict = "" if need["fits"] else "; this does not fit"
    contexts = " · ".join(
        f"{each['ctx']:,}: {show_size(each['total'])}{'' if each['fits'] else ' (too much)'}"
        for each in need["contexts"]
    )
    lines = [f"needs     {words}"]
    if need["tp"] > 1:
        lines.append(f"{MARGIN}the drafter on {need['draft_tp']} of them: {need['draft_tp_reason']}")
    if known:
        lines.append(f"{MARGIN}{there}{verdict}")
    if (kept_beside := need["checkpoint_bytes"] - need["parts"]["checkpoints"]) > 0:
        lines.append(f"{MARGIN}checkpoints in the host's memory: {show_size(kept_beside)}")
    if len(need["contexts"]) > 1:
        lines.append(f"{MARGIN}by context: {contexts}")
    return lines

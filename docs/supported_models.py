"""Print `docs/supported-models.md` from the program's own tables.

Usage, from the repository's root: python docs/supported_models.py > docs/supported-models.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from spd.formats import assistant, block, eagle3, mtp_layout
from spd.formats.block_config import ATTENTION_KINDS
from spd.formats.checkpoint import FLOAT_DTYPES
from spd.formats.gguf.architectures import ARCHITECTURES
from spd.formats.gguf.block_types import READABLE_TYPES, TYPES_BY_NAME
from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.formats.rope_config import RopeKind
from spd.kernels.capabilities import SUPER_BLOCK
from spd.runtime.models import FAMILIES
from spd.runtime.models.gguf_forms import FORMS

NOTES = """\
A folder is what Hugging Face's `save_pretrained` writes: `config.json`, `tokenizer.json` and safetensors, one
file or shards with an index. Nothing in it is executed. An unknown value of a known key is refused by name,
and so is a folder in which a tensor is missing or has another shape. Tensors that are not used are named.

- **Tensors**: {dtypes}; what quantized checkpoints hold besides. Rounding to FP8 moves a weight by at most a
  sixteenth of itself (or a 1,024th of its block's scale where that is more): the logits of the demo's twin in
  blocks of 128 x 128 are off by 3.5 % of their spread, by 4.0 % with scales that are powers of two.
- **Shards**: the index decides where two shards hold a tensor; a file that it does not name is read for
  MTP layers alone. A stored `lm_head` is used where it differs from the embedding, whatever
  `tie_word_embeddings` says.
- **Tokens and templates**: special tokens with names of their own (`extra_special_tokens`,
  `model_specific_special_tokens`, keys in `_token`), tokens of `added_tokens_decoder` or
  `added_tokens.json` that `tokenizer.json` lacks, and `additional_chat_templates/`, as transformers reads
  them.
- **Quantized checkpoints**: compressed-tensors (`pack-quantized` of 1 to 8 bits, symmetric or with zero
  points, by groups or rows; `int-quantized` of 8 bits; `float-quantized` by tensor, row or block;
  `nvfp4-pack-quantized`, `mxfp4-pack-quantized`), GPTQ (v1 and v2, 2, 3, 4 and 8 bits, `dynamic`), AutoAWQ's
  `gemm`, ModelOpt's FP8 and NVFP4, mixed too; FP8 in blocks (`fp8` with `weight_block_size`); gpt-oss's own
  MXFP4. Activations are not rounded unless `--activations int8` asks for it: W8A8 and
  W4A4 releases run as W8A16 and W4A16. The codes stay packed in memory, experts' too, in groups of 16, 32,
  64, a multiple of 128 or a whole row. Multiplied out are GPTQ with act-order, other groups, embeddings,
  heads, what stands outside the layers, and on a GPU everything in float16. MTP layers may be stored in the
  same way or left as they were, whatever the ignore list says. Bitsandbytes, EXL3, rotated or sparse
  weights and planar GPTQ are refused by name, and so are patterns with references to
  groups or with flags.
- **`--quantize int4`**: as int8 below, with a float16 scale for 32 columns that is chosen to err least, and
  with more bits where the answer needs them. Most matrices have four bits, one of 16 uneven levels (GGUF's
  IQ4_NL); the last one of an MLP five; values, the head and an embedding that is the head too six; what
  latent attention absorbs eight, in the file: in memory it is multiplied out. A model whose hidden size is no
  multiple of 256 has five bits for four, and six for the last one of an MLP, queries and keys: small models
  lose more. Rows of other lengths stay as they are. The demo's logits move by 8 % of their own spread. Kept
  packed, but on a GPU in float16: there the rounded values are multiplied, which saves no memory; and
  embedding and head on several ranks. `spd quantize MODEL DIR` writes it as a folder that `spd` reads.
- **`--quantize int8`**: the matrices of the layers, experts too, of the target, the draft model and the
  MTP layers; a scale a row, its largest magnitude over 127 rounded to bfloat16, so that each weight is
  off by at most half a step of its row. Embeddings, heads, routers, MTP projections and the matrix that
  latent attention absorbs stay as they are. The demo's logits move by 2.3 % of their own spread; from
  float32 to bfloat16 they move by 2.5 %. Every set of kernels keeps them as int8.
  Weights that are quantized already are refused.
- **Rotary embedding**: {ropes}.
  LongRoPE works up to the model's original context, with its short factors. Beyond it every earlier position
  would have to be rotated again, so `--ctx` ends there.
- **Layers**: {kinds},
  by `layer_types` or by the older keys. With sliding windows the cache still keeps every position, so that
  prefixes are found and replays repeated whatever the windows are; keys outside a window are not read.
- **Recurrent layers** (gated DeltaNet, Mamba-2): a state a slot in float32, whatever the weights are, and the
  rows of the latest rounds; short convolutions (LFM2) keep rows alone. A prompt continues from the latest
  saved copy of what is kept for its beginning. Copies are kept in the host's memory: at the end of a turn, at
  the end of a prompt, and along a long one. With `--tp N` each rank holds the states of its own key heads
  and of the value heads that read them: N must divide the number of key heads, 16 in Qwen3.5, or of
  Mamba-2's groups, which for Granite 4 is one.
- **Draft models**: any of these with the target's tokenizer.
- **EAGLE-3 heads**: folders given as `--draft-model`, for any of these targets, that say
  {eagle3} or the type `eagle3` of `speculators`: one Llama layer, with
  the target's vocabulary or a part of it. Tensors are safetensors here, too: the first published heads
  are pickles, which spd does not open; the refusal names the command that converts one. A head drafts up
  to the end of the context, even beyond its training length.
- **Block drafters**: DFlash, DFlash 2 and DSpark, folders given as `--draft-model` that say {blocks} or a
  type of `speculators`, {block_types}: layers of Qwen3's kind that read the target's layers which the
  file names (a file that names none is refused), with the target's embedding and output head, or a head over
  a part of its ids. One pass drafts a block of tokens, as many as the file says; DFlash 2
  and DSpark then choose each by the token before it too. DSpark's confidence head is not run: the number of
  drafts follows what is accepted. Refused are the types P-EAGLE and XPress, and DSpark in other
  configurations than those of `speculators`.
- **Assistants of Gemma 4** ({assistants}): folders given as `--draft-model`, or
  found by the target's name with `-assistant` behind it, beside the target or in the cache. They read the
  target's own keys and values and take no cache; their sliding layers see as many positions as the target's.
"""


def table_lines(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = list(header)
    for row in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(row)} |"


def first_sentence(layout: Callable[..., object]) -> str:
    """Return the first sentence of the docstring of a family's function."""
    text = " ".join((layout.__doc__ or "").split("\n\n")[0].split())
    return text.removeprefix("Lay out ").split(". ")[0].rstrip(".")


GGUF = """\
## GGUF files

A GGUF file (v2 or v3, little-endian, split or not) is read by its own keys and tensors; what
llama.cpp's converter did to weights is undone when they are loaded. MTP heads and Gemma 4's assistants may
stand in files of their own. A file with tensors that its model does not use is refused, but for those that
see or hear. Not read: EAGLE-3 heads, adapters, images, and what a file cannot say, such as the windows of
Mistral's first models, which llama.cpp drops.

An architecture of the second table may come in any type of this one; other types are refused by name.
Values equal those of ggml's reference bit for bit in float32. Packed weights stay packed in memory, by C
and by Triton kernels; with `--kernels torch`, and by Triton in float16, they are multiplied out too:
rounded once, to the run's dtype. So are, in every file, the matrix that latent attention multiplies head
by head, experts whose gates have another type than their inputs, and with `--tp` embedding and head.
"""


def gguf_section() -> list[str]:
    """Return the lines about GGUF files, with their architectures and classes of Hugging Face."""
    rows = []
    for name, row in ARCHITECTURES.items():
        classes = dict.fromkeys((row.model_class, *row.variants.values()))
        heads = "read" if row.mtp else ""
        rows.append(
            (
                f"`{name}`",
                ", ".join(f"`{model_class}ForCausalLM`" for model_class in classes),
                heads,
            )
        )
    types = [(name, file_bits(name), memory_bits(name)) for name in READABLE_TYPES]
    type_header = ("type", "bits a weight in the file", "in memory")
    header = ("`general.architecture`", "read as", "MTP layers")
    return [
        *GGUF.split("\n"),
        *table_lines(type_header, types),
        "",
        *table_lines(header, rows),
    ]


def file_bits(name: str) -> str:
    """Return the bits of a weight of a GGUF type in a file."""
    block = TYPES_BY_NAME[name]
    return f"{8 * block.nbytes / block.elements:g}"


def memory_bits(name: str) -> str:
    """Return the bits of a weight of a GGUF type in memory, or that it has the run's dtype."""
    form = FORMS.get(name)
    if form is None:
        return "the run's dtype"
    return f"packed: {8 * form.count_bytes((1, SUPER_BLOCK)) / SUPER_BLOCK:g}"


def make_document() -> str:
    """Return the page."""
    heads: dict[str, list[str]] = {}
    for family in mtp_layout.MTP_FAMILIES:
        for architecture in family.architectures:
            heads.setdefault(architecture, []).append(family.name)
    families = []
    for name in SUPPORTED_ARCHITECTURES:
        text = WRAPPERS[name][1] if name in WRAPPERS else name
        description = (
            f"the text of {text}, without images"
            if name in WRAPPERS
            else first_sentence(FAMILIES[name])
        )
        families.append((f"`{name}`", description, ", ".join(heads.get(text, []))))
    other_names = [name for name in heads if name not in FAMILIES]
    notes = NOTES.format(
        dtypes=", ".join(FLOAT_DTYPES),
        ropes=", ".join(get_args(RopeKind)),
        kinds=" and ".join(f"`{kind}`" for kind in ATTENTION_KINDS),
        blocks=", ".join(f"`{name}`" for name in block.KINDS),
        block_types=" or ".join(f"`{name}`" for name in block.MODEL_TYPES),
        eagle3=", ".join(f"`{name}`" for name in eagle3.ARCHITECTURES),
        assistants=", ".join(f"`{name}`" for name in assistant.ARCHITECTURES),
    )
    lines = [
        "# Supported models",
        "",
        "Written by `docs/supported_models.py`; a test compares it with the program.",
        "",
        *table_lines(("architecture", "family", "MTP heads"), families),
        "",
        notes,
        "## MTP heads",
        "",
        "Heads are found by the names of their tensors; "
        f"the families known are {', '.join(family.name for family in mtp_layout.MTP_FAMILIES)}.",
    ]
    if other_names:
        lines.append(
            f"Known for targets that are not served yet: {', '.join(f'`{name}`' for name in other_names)}."
        )
    lines += ["", *gguf_section()]
    lines += [
        "",
        "[Every class of transformers](every-class.md): which open, and why others do not.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_document())

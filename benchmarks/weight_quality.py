"""What weights in few bits do to a model's distributions, beside the weights that they were made of.

    python -m benchmarks.weight_quality FOLDER CANDIDATE... [--context 512] [--tokens 5120] [--out FILE]

A candidate is `int4` or `int8`, which is FOLDER with `--quantize`, or a folder or GGUF file of the
same weights, such as `llama-quantize` writes. The text is Python of the standard library, cut into
prompts of `context` tokens. Printed are bits a weight, counted over all tensors, the divergence
KL(FOLDER, candidate) of the next token's distributions with its interval of 95 %, and the share of
positions whose likeliest token is another one. Both sides run the same kernels.

Published files lie on the grid of their own blocks. `--off-grid FILE OUT` writes what does not: the
folder OUT and the file OUT.gguf with FILE's weights in bfloat16, to each of which seeded noise
within half a step of its block is added (it needs `gguf` and `transformers`).
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import describe_commit, describe_machine
from spd.formats.demo import DEMOS, demo_folder
from spd.formats.folder import ModelFolder
from spd.formats.gguf.container import GgufFile
from spd.kernels.capabilities import CODE_BITS, ROUNDING_GROUP
from spd.runtime import Engine, EngineConfig
from spd.runtime.models import family_layout
from spd.runtime.models.weights import iterate_parameters
from spd.runtime.plan.config import QUANTIZE
from spd.runtime.round.limits import PAGE_SIZE
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.rows import PromptPart, SlotView

SCHEMA = "spd.benchmarks.weight_quality/1"
MODULES = (
    "argparse",
    "ast",
    "bisect",
    "calendar",
    "configparser",
    "csv",
    "datetime",
    "difflib",
    "doctest",
    "heapq",
    "inspect",
    "mailbox",
    "optparse",
    "pathlib",
    "shlex",
    "smtplib",
    "string",
    "subprocess",
    "tarfile",
    "textwrap",
    "typing",
    "zipfile",
)
"""Modules of the standard library whose sources are the text."""
ROWS = 64
"""Rows whose distributions are in memory together."""
BLOCK = 32
"""Columns that share a step at least."""
SEED = 7


def cut_text(folder: ModelFolder, context: int, tokens: int) -> list[list[int]]:
    """Return prompts of `context` tokens, as many as `tokens` hold."""
    tokenizer = folder.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("\n".join(inspect.getsource(import_module(name)) for name in MODULES))
    borders = range(0, min(tokens, len(ids)) + 1, context)
    return [ids[first:end] for first, end in pairwise(borders)]


def open_engine(place: Path, context: int, quantize: str = "none") -> Engine:
    """Return an engine without drafts for one prompt at a time."""
    config = EngineConfig(
        model=ModelFolder.resolve(str(place)),
        spec="off",
        slots=1,
        ctx=context + 1,
        quantize=quantize,
        dtype="bfloat16",
    )
    return Engine(config)


@torch.inference_mode()
def iterate_logits(engine: Engine, prompt: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits [T, V] of a prompt, at most `ROWS` rows at a time, in float32."""
    queue = engine.round_queue
    assert isinstance(queue, LocalRoundQueue)
    runner = queue.runner
    pages = range(2, 2 + -(-len(prompt) // PAGE_SIZE))
    for begin in range(0, len(prompt), runner.chunk):
        end = min(begin + runner.chunk, len(prompt))
        part = PromptPart(
            slot=0,
            token_ids=torch.tensor([prompt]),
            begin=begin,
            end=end,
            view=SlotView(end, pages),
            chunked=end - begin == runner.chunk,
        )
        output = runner.forward_prompt(part)
        for first in range(0, end - begin, ROWS):
            yield runner.logits(output.hidden[:, first : first + ROWS])[0].float()


def compare(
    reference: Engine, candidate: Engine, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the divergence of a candidate's distributions from the reference's, over all prompts."""
    divergences: list[Tensor] = []
    changed = 0
    for prompt in prompts:
        pairs = zip(
            iterate_logits(reference, prompt), iterate_logits(candidate, prompt), strict=True
        )
        for expected, logits in pairs:
            log_expected = expected.log_softmax(-1)
            differences = log_expected.exp() * (log_expected - logits.log_softmax(-1))
            divergences.append(differences.sum(-1).double())
            changed += int((expected.argmax(-1) != logits.argmax(-1)).sum())
    values = torch.cat(divergences)
    count = len(values)
    return {
        "tokens": count,
        "divergence": float(values.mean()),
        "interval": 1.96 * float(values.std()) / math.sqrt(count),
        "median": statistics.median(values.tolist()),
        "likeliest_changed": changed / count,
    }


def count_bytes(engine: Engine, place: Path) -> int:
    """Return the bytes of all tensors: those of a GGUF file, else those in memory, each once.

    What fills rows up to the steps of a GPU's kernels is not counted.
    """
    if place.suffix == ".gguf":
        return sum(tensor.nbytes for tensor in GgufFile.open(place).tensors.values())
    config = engine.plan.model.config
    shape = engine.plan.shape
    total = 0
    for prefix, parameter in iterate_parameters(config, family_layout(config)):
        if rounded := shape.form.find_rounded_specs(parameter, is_table=not prefix):
            for source, spec in rounded:
                bits = CODE_BITS[spec.kind] + 16 / ROUNDING_GROUP
                total += round(math.prod(source.shape) * bits / 8)
        else:
            is_table = not prefix
            total += shape.form.count_bytes(parameter, prefix, shape.dtype, is_table=is_table)
    return total


def measure(
    folder: Path, candidates: Sequence[str], context: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each candidate."""
    prompts = cut_text(ModelFolder(folder), context, tokens)
    reference = open_engine(folder, context)
    num_weights = count_bytes(reference, folder) / 2
    for candidate in candidates:
        is_quantized = candidate in QUANTIZE
        place = folder if is_quantized else Path(candidate)
        engine = open_engine(place, context, candidate if is_quantized else "none")
        figures = {"bits": 8 * count_bytes(engine, place) / num_weights}
        figures |= compare(reference, engine, prompts)
        engine.close()
        yield {"candidate": place.name if place != folder else candidate} | figures


def add_noise(values: Tensor, generator: torch.Generator) -> Tensor:
    """Return values with noise within half a step: the least distance of two in a block."""
    blocks = values.float().reshape(-1, BLOCK)
    distances = blocks.sort(dim=1).values.diff(dim=1)
    is_rounding = distances <= 1e-6 * blocks.abs().amax(dim=1, keepdim=True)
    steps = distances.masked_fill(is_rounding, math.inf).amin(dim=1, keepdim=True)
    steps = steps.masked_fill(steps.isinf(), 0.0)
    noise = torch.rand(blocks.shape, generator=generator) - 0.5
    return (blocks + steps * noise).view(values.shape).bfloat16()


def write_off_grid(source: Path, out: Path) -> None:
    """Write a folder and a GGUF file with a published file's weights, off their grid."""
    gguf = import_module("gguf")
    transformers = import_module("transformers")
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out.with_name(f"{out.name}.gguf"), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    generator = torch.Generator().manual_seed(SEED)
    types = gguf.GGMLQuantizationType
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        values = values.view([int(size) for size in reversed(tensor.shape)])
        if tensor.tensor_type == types.F32:
            writer.add_tensor(tensor.name, values.numpy(), raw_dtype=types.F32)
        else:
            rounded = add_noise(values, generator)
            writer.add_tensor(tensor.name, rounded.view(torch.uint8).numpy(), raw_dtype=types.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    name = f"{out.name}.gguf"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out.parent, gguf_file=name, dtype=torch.bfloat16
    )
    del model.config.quantization_config  # its values are multiplied out
    model.hf_quantizer = None
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(out.parent, gguf_file=name).save_pretrained(out)


def main(words: Sequence[str] | None = None) -> int:
    """Print a line for each candidate, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("candidates", nargs="*")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--off-grid", nargs=2, type=Path, metavar=("FILE", "OUT"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    if arguments.off_grid is not None:
        write_off_grid(arguments.off_grid[0], arguments.off_grid[1])
    if arguments.folder is None:
        return 0
    demo = arguments.folder in DEMOS
    folder = demo_folder(arguments.folder) if demo else Path(arguments.folder)
    results = []
    for result in measure(folder, arguments.candidates, arguments.context, arguments.tokens):
        results.append(result)
        print(
            f"{result['candidate']}: {result['bits']:.3f} bits a weight, divergence "
            f"{result['divergence']:.5f} ± {result['interval']:.5f} of {result['tokens']} tokens, "
            f"median {result['median']:.5f}, likeliest token changed {result['likeliest_changed']:.2%}",
            flush=True,
        )
    if arguments.out is not None:
        report = {"schema": SCHEMA, **describe_commit(), "machine": describe_machine()}
        report |= {"model": folder.name, "context": arguments.context, "results": results}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The runs of both trees: command lines of spd in cells, and their checkpoints and prompts."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DRAFTERS = ("off", "ngram", "mtp", "draft", "eagle3", "mtp,ngram", "draft,ngram", "eagle3,ngram")
MODULES = """argparse ast bisect calendar configparser csv difflib fnmatch inspect locale os posixpath random
runpy shlex shutil statistics sysconfig textwrap tokenize trace warnings webbrowser"""
DEMO_FORMS = (
    "--kernels torch --lag 1",
    "--quantize int8",
    "--dtype float32 --kernels torch --lag 2",
    "--tp 2",
)
FORMS = ("--dtype float32 --kernels torch", "--dtype bfloat16 --kernels torch", "--dtype bfloat16")
OLD_NATIVE = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
"""Whether C kernels of every tree run here: older ones have none for processors with AVX2 alone."""
SAME_ARITHMETIC = "" if OLD_NATIVE else "--dtype float32 --kernels torch"
"""What makes trees with other C kernels choose one arithmetic."""
SHELF = """
import json, shutil, sys
from pathlib import Path
from tests.recipes import tiny, tiny_dense, tiny_eagle3, tiny_mtp
try:
    from tests.recipes.fp8_twin import write_twin
except ImportError:
    from tests.recipes.packed_twin import write_twin
out, soft = Path(sys.argv[1]), lambda layer: 1.0 if layer < 2 else 0.12
shutil.rmtree(out)
shelf = {name: (tiny.write_tiny(out / name, **shape), "") for name, shape in tiny.VARIANTS.items()}
for name in tiny_dense.FAMILIES:
    shelf[name] = tiny_dense.write_dense(out / name, name, residual_gain=soft), ""
heads = "deepseek qwen3 2|deepseek deepseek_v3 1|mimo qwen3 3|ernie llama2 1|mtp qwen3 1|glm4 glm4_moe 1"
for family, variant, modules in map(str.split, heads.split("|")):
    folder = out / f"mtp-{family}-{variant}"
    tiny_mtp.write_tiny_mtp(folder, family=family, variant=variant, modules=int(modules), kind="copy")
    shelf[folder.name] = folder, "mtp"
for name in tiny_eagle3.LAYERS:
    head = tiny_eagle3.write_tiny_pair(out / f"eagle3-{name}", out / f"{name}-head", kind="copy", layout=name)
    shelf[f"eagle3-{name}"] = out / f"eagle3-{name}", f"eagle3 --draft-model {head}"
demo = next(Path("spd").rglob("demo/training.json")).parent
for source in (demo, out / "qwen3", out / "deepseek_v3"):
    twin = write_twin(source, out / f"fp8-{source.name}")
    shelf[twin.name] = twin, "mtp" * (source == demo)
for name, files in (("empty", 0), ("no-weights", 2), ("cut", 3), ("unread", 3)):
    (out / "bad" / name).mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors")[:files]:
        shutil.copy(out / "llama2" / file, out / "bad" / name)
(out / "bad/cut/model.safetensors").write_bytes((out / "llama2/model.safetensors").read_bytes()[:-1000])
(out / "bad/unread/config.json").write_text("{")
(out / "shelf.json").write_text(json.dumps(shelf, default=str))
"""  # run once in the old tree, whose recipes write what both trees read
SAMPLED: tuple[dict[str, Any], ...] = (
    {"top_k": 5, "logprobs": 5, "stop_token_ids": [290, 14], "seed": 11},
    {"top_p": 0.8, "stop": ["\n", "the"], "ignore_eos": True},
    {"min_p": 0.1, "temperature": 1.3, "logit_bias": {"10": 3, "20": -100}, "min_tokens": 9},
    {"repetition_penalty": 1.3, "temperature": 0},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"regex": "[a-z ]{5,40}"},
    {"schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)
PLANS = """--spec auto|--spec off|--spec mtp|--spec draft|--spec eagle3|--spec ngram|--spec auto,ngram
--ctx 1k|--ctx 100|--dtype float32 --kernels torch|--dtype float16|--quantize int8|--kernels torch|--lag 2
--memory-fraction 0.01|--spec draft|--spec mtp --draft-max 6|--spec mtp --no-adaptive
--verify block --temperature 1|--verify rejection --draft-max 5 --temperature 0.5|--graphs off|--threads 2
--tp 2 --draft-tp 2"""
BAD = """x --spec mtp,draft|x --draft-max 99|x --draft-max 0|x --spec off --draft-max 3|x --temperature nan
x --top-p 2|x -n 0|x --set min_tokens=9 -n 4|x --ctx 8x|x --seed abc|x --seed 99999999999999999999999
x --set logit_bias=9|x --set logit_bias=99999=1|x --logprobs 3|--prompt-ids 99999|x --ctx 9k|--prompt-ids 1 x
x --raw -s y|x -m no-such-folder|x -m {0}/empty|x -m {0}/no-weights|x -m {0}/cut|x -m {0}/unread
x --device foo|x --device cuda|x --kernels triton|x --tp 3|x --draft-tp 2|x --threads 0
x --memory-fraction 2|x --verify foo|x --verify block --adaptive --temperature 1
x --verify block --spec off --temperature 1|x -m {1} --spec mtp|x -m {1} --spec draft
x -m {1} --draft-model demo|x --spec mtp --draft-model {1}|x y|x --schema {{|x --grammar /(/
x --grammar nothing|x --grammar /a/ --schema {{}}|x -f no-such-file|x --no-such-flag|x -q -v
x -o no/such/folder|--jsonl|--jsonl --json"""
LINES = """{"prompt": 1}|{"prompt": "a", "x": 1}|{"prompt": "a", "params": {"top_k": "b"}}|[]|{
{"prompt_ids": []}|{"messages": []}|{"prompt": "a", "prompt_ids": [3]}|{"prompt_ids": [99999]}|{"id": 7}
{"prompt": "", "id": "b"}|{"prompt": "a", "params": {"temperature": -1}}
{"prompt": "a", "params": {"regex": "("}}|{"prompt": "fine", "params": {"max_tokens": 3}}
{"custom_id": "c", "body": {"prompt": "a", "n": 2}}"""


class Run(NamedTuple):
    """A command line, its standard input, and True where a trace is written."""

    argv: list[str]
    stdin: str = ""
    trace: bool = False


Cell = tuple[str, list[Run]]
Shelf = dict[str, tuple[str, str]]  # checkpoints: the folder, and what asks for the own head


def make_prompts(tree: Path, limit: int) -> list[str]:
    """Return the benchmarks' prompts, then questions, code and repetitive text of the library."""
    prompt_lines = (
        next((tree / "spd").rglob("prompts.jsonl")).read_text(encoding="utf-8").splitlines()
    )
    prompts: list[str] = [json.loads(line)["prompt"] for line in prompt_lines]
    for name in MODULES.split():
        source = inspect.getsource(importlib.import_module(name))
        for match in re.finditer(r"^def ([a-z]\w+)\(.*?(?=^\S)", source, re.MULTILINE | re.DOTALL):
            word = match[1]
            code = match[0][:2400].rstrip()
            head = "\n".join(code.splitlines()[:6])
            edit = f"Rename {word} to {word}_of in this code and print it again.\n\n{code}"
            kinds = (f"What does {name}.{word} do?", head, edit, f"{head[:200]}\n" * 5)
            prompts.append(kinds[len(prompts) % 4])
    return prompts[:limit]


def batch(argv: str, prompts: list[str], *params: dict[str, Any]) -> Run:
    """Return a run of prompts in chats, together in one engine; sets of parameters take turns.

    Each has a seed of its own, since trees derive those of lines without one in different ways.
    """
    param_sets = params or ({},)
    lines = [
        {"prompt": text, "params": {"seed": number} | param_sets[number % len(param_sets)]}
        for number, text in enumerate(prompts)
    ]
    return Run([*argv.split(), "--jsonl"], "".join(f"{json.dumps(line)}\n" for line in lines))


def alone(argv: str, prompt: str) -> Run:
    """Return a run of one prompt with a line a round; code is continued as it stands."""
    return Run(
        [*argv.split(), "--json", *["--raw"] * prompt.startswith("def "), "--", prompt], trace=True
    )


def demo_cells(prompts: list[str]) -> Iterator[Cell]:
    """Yield the demo with every drafter, k, lag and temperature, the rules and the arithmetic.

    Every drafter meets every prompt in a batch at each temperature, and alone.
    """
    for shift, spec in enumerate(DRAFTERS):
        ks = (1, 3, 5) if shift else (0,)
        base = f"generate --threads 1 --seed 7 -n 32 {SAME_ARITHMETIC} --spec {spec} --temperature"
        variants = [
            (f"{temperature} --lag {lag}", k)
            for temperature in ("0", "0.8")
            for k in ks
            for lag in range(3)
        ]
        variants += [
            (f"0.8 {form}", ks[-1]) for form in DEMO_FORMS if OLD_NATIVE or "--dtype" not in form
        ]
        variants += [
            (f"0.8 --verify {rule} --lag {n}", 4)
            for rule in ("block", "rejection")
            for n in (0, 2)
            if shift
        ]
        for turn, (variant, k) in enumerate(variants, shift):
            argv = f"{base} {variant}" + (f" --no-adaptive --draft-max {k}" if k else "")
            name = f"demo/{spec}/k{k}-T{variant.replace('--', '').replace(' ', '-')}"
            single = [alone(argv, prompt) for prompt in prompts[turn % 18 :: 18]]
            yield name, [batch(argv, prompts[turn % 9 :: 9]), *single]
        fixed = f"{base} 0.9" + (" --no-adaptive --draft-max 4" if shift else "")
        # How many drafts an adaptive run makes depends on measured costs, so only its text is compared.
        adaptive = [Run([*f"{base} 0.7 --".split(), prompt]) for prompt in prompts[1::40]]
        yield (
            f"demo/{spec}/sampling",
            [batch(fixed, prompts[: 3 * len(SAMPLED)], *SAMPLED), *adaptive],
        )


def family_cells(shelf: Shelf, prompts: list[str]) -> Iterator[Cell]:
    """Yield every tiny checkpoint in each arithmetic: plain, by lookup, its own draft, its head."""
    short_prompts = [
        prompts[n % len(prompts)][:size] for n, size in enumerate((400, 30, 250, 90, 3))
    ]
    for name, (folder, head) in shelf.items():
        extra_forms = (
            ("--quantize int8", "--kernels torch --tp 2")
            if name in ("llama2", "deepseek_v3", "mtp-mimo-qwen3")
            else ()
        )
        for form in (
            *FORMS[: 3 if OLD_NATIVE else 2],
            *(f"{form_options} {SAME_ARITHMETIC}" for form_options in extra_forms),
        ):
            base = f"generate -m {folder} --threads 1 -n 24 --set ignore_eos=on --seed 3 {form}"
            runs = [batch(f"{base} --temperature 0 --spec off", short_prompts, {"logprobs": 3})]
            for spec in filter(None, ("ngram", f"draft --draft-model {folder}", head)):
                argv = f"{base} --temperature 0.6 --no-adaptive --draft-max 3 --lag 1 --spec {spec}"
                runs += [batch(argv, short_prompts, {"logprobs": 1}), alone(argv, short_prompts[2])]
            yield f"family/{name}/{form.replace('--', '').replace(' ', '-')}", runs


def other_cells(shelf: Shelf) -> Iterator[Cell]:
    """Yield plans, refusals, and the compiled kernels."""

    def runs(words: str, table: str) -> list[Run]:
        return [
            Run([*words.split(), *arguments.split()])
            for arguments in table.replace("\n", "|").split("|")
        ]

    llama = shelf["llama2"][0]
    folders = "|".join(folder for folder, _ in shelf.values())
    bad = Path(llama).with_name("bad")
    pair = f"{shelf['llama3'][0]} --draft {llama}"
    yield (
        "plan/generate",
        runs(f"generate {SAME_ARITHMETIC} --prompt-ids 5,6,7 --seed 3 --json -n 2", PLANS),
    )
    if OLD_NATIVE:
        yield (
            "plan/inspect",
            runs("inspect --json", f"demo|demo --quantize int8|demo --tp 2|{pair}|{folders}"),
        )
    refused = runs(f"generate {SAME_ARITHMETIC} -n 4 --seed 1", BAD.format(bad, llama))
    refused += runs(
        "", f"|nothing|chat|inspect x|inspect -m x|inspect {bad}/cut|inspect {bad}/unread"
    )
    refused.append(
        Run(
            ["generate", *SAME_ARITHMETIC.split(), "--jsonl", "-n", "4", "--seed", "1"],
            LINES.replace("|", "\n"),
        )
    )
    refused.append(
        Run(["generate", *SAME_ARITHMETIC.split(), "--ctx", "64", "--seed", "1", "word " * 200])
    )
    yield "refused", refused
    yield "kernels/sm_90", [Run(["--compile", "90"])]

"""The demo keeps what its label says: it answers, does not loop, and its drafts get accepted."""

import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from spd.formats.chat_template import ChatTemplate, encode_rendered, render_chat
from spd.formats.demo import demo_draft_folder, demo_folder
from spd.formats.tokenizer import Tokenizer
from spd.runtime import SamplingParams
from tests.helpers import Run, count_accepted, count_drafted, make_engine, run_all
from tests.recipes.demo_corpus import build_corpus, measure_held_out
from tests.recipes.demo_model import TARGETS

QUESTIONS = {
    "os.path.join": ("join", "path"),
    "os.listdir": ("list", "directory"),
    "os.getcwd": ("current", "directory"),
    "os.path.exists": ("path", "exists"),
    "os.remove": ("remove", "file"),
    "json.dumps": ("serialize", "json"),
    "len": ("number", "items"),
    "json.loads": ("deserialize", "json"),
    "math.sqrt": ("square root",),
    "re.sub": ("replac", "pattern"),
    "re.compile": ("compile", "pattern"),
    "random.choice": ("random", "element"),
    "random.shuffle": ("shuffle",),
    "time.sleep": ("delay", "second"),
    "glob.glob": ("path", "pattern"),
    "textwrap.dedent": ("whitespace",),
    "heapq.heappush": ("heap", "item"),
    "functools.reduce": ("function", "sequence"),
    "dict.get": ("key", "default"),
    "str.join": ("concatenate", "string"),
}
SHAPES = {"deepseek_v3": "deepseek", "qwen3_5_text": "hybrid"}
DEMOS = [
    folder for folder in (demo_folder(), demo_folder().with_name("demo-hybrid")) if folder.exists()
]
every_demo = pytest.mark.parametrize("folder", DEMOS, ids=lambda folder: folder.name)


def ask(name: str, folder: Path = demo_folder()) -> tuple[int, ...]:
    template = ChatTemplate.open(folder)
    assert template is not None
    messages = [{"role": "user", "content": f"What does {name} do?"}]
    tokenizer = Tokenizer.open(folder)
    return tuple(encode_rendered(tokenizer, render_chat(tokenizer, template, messages)))


def replies(folder: Path, temperature: float, count: int, **options: object) -> list[Run]:
    """Return replies drafted by the MTP layer unless options say otherwise; the texts are equal."""
    names = list(QUESTIONS)
    drafts = {"spec": "mtp", "draft_max": 2, "adaptive": False}
    engine = make_engine(folder, dtype="bfloat16", ctx=512, slots=10, **{**drafts, **options})
    prompts = [ask(names[i % len(names)], folder) for i in range(count)]
    params = [SamplingParams(temperature=temperature, max_tokens=64, seed=i) for i in range(count)]
    return run_all(engine, prompts, params)


@pytest.mark.covers(count=1)
@every_demo
def test_it_answers_questions_about_documented_functions(folder: Path, say: Callable) -> None:
    answered = 0
    runs = replies(folder, 0.0, len(QUESTIONS))
    for run, (name, words) in zip(runs, QUESTIONS.items(), strict=True):
        good = all(word in run.text.lower() for word in words)
        answered += good
        say(f"{'+' if good else '-'} {name}: {run.text}")
    assert answered >= 15, f"{answered} of {len(QUESTIONS)} answered"
    assert count_accepted(runs) > 0.3 * count_drafted(runs), (
        f"{count_accepted(runs)} of {count_drafted(runs)}"
    )


@pytest.mark.covers(count=1)
@every_demo
def test_sampled_replies_are_no_loop(folder: Path) -> None:
    reply_words = [run.text.split() for run in replies(folder, 0.8, 20)]
    grams = [tuple(words[i : i + 4]) for words in reply_words for i in range(len(words) - 3)]
    assert len(grams) > 160
    assert len(set(grams)) / len(grams) >= 0.6


def test_it_fits_and_says_what_it_is() -> None:
    files = [path for path in demo_folder().rglob("*") if path.is_file()]
    weights = [path for path in files if path.suffix == ".safetensors"]
    assert len(weights) == 3 and sum(path.stat().st_size for path in weights) <= 26 * 2**20
    record = json.loads((demo_folder() / "training.json").read_text())
    for stage in ("target", "draft"):
        stage_record = record[stage]
        assert (
            stage_record["tokens"] > 0
            and stage_record["seconds"] > 0
            and len(stage_record["curve"]) >= 10
        )
    folders = demo_folder(), demo_draft_folder()
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1


@every_demo
def test_its_readme_and_sums_are_those_of_the_record(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text())
    words = " ".join((folder / "README.md").read_text().split())
    held_out_record = record["held_out"]
    facts = [
        f"{held_out_record['parameters']:,} parameters",
        f"{held_out_record['bits_per_byte']:.3f} bits",
    ]
    facts += [
        f"{record[stage]['tokens']:,}" for stage in ("target", "mtp", "draft") if stage in record
    ]
    facts += [
        ", ".join(f"{share:.0%}" for share in held_out_record["mtp_acceptance"]),
        record["corpus_sha256"],
    ]
    facts += [f"{held_out_record['bigram_acceptance']:.0%}"]
    assert [fact for fact in facts if fact not in words] == []
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_natural_acceptance_is_counted() -> None:
    draft = {"spec": "draft", "draft_model": demo_draft_folder(), "draft_max": 4}
    for options, least in ((draft, 0.05), ({"spec": "eagle3"}, 0.25)):
        runs = replies(demo_folder(), 0.0, 10, **options)
        assert count_accepted(runs) > least * count_drafted(runs), (
            f"{count_accepted(runs)} of {count_drafted(runs)}"
        )


@every_demo
@pytest.mark.slow
def test_on_held_out_text_it_beats_xz_and_its_mtp_layer_a_table(
    folder: Path, say: Callable
) -> None:
    """Measured by the recipe's forward pass on modules outside the training text."""
    corpus = build_corpus()
    record = json.loads((folder / "training.json").read_text())
    if record["corpus_sha256"] != corpus.digest():
        pytest.skip("another Python version: its standard library was not held out")
    shape = TARGETS[SHAPES[json.loads((folder / "config.json").read_text())["model_type"]]]
    tokenizer = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    scores = measure_held_out(folder, corpus, tokenizer, shape)
    text = "".join(corpus.held_out).encode()
    xz = 8 * len(lzma.compress(text, preset=9)) / len(text)
    say(f"{folder.name}: {scores}; xz -9 takes {xz:.3f} bits a byte")
    assert scores["bits_per_byte"] < xz
    assert scores["mtp_acceptance"] == pytest.approx(record["held_out"]["mtp_acceptance"], abs=0.01)
    first = scores["mtp_acceptance"][0]
    assert first >= scores["bigram_acceptance"] + 0.10
    assert first >= 0.60 or folder != demo_folder()

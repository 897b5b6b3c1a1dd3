"""A checkpoint into llama.cpp's format by its own script: `python to_gguf.py LLAMA_CPP MODEL OUT DTYPE`.

The script knows tokenizers by a hash of what they make of a text, and refuses the others; the
recipes' byte-level ones split as GPT-2's does, so that is the name they get. It also imports a
package before it looks for the file which that would read. No text is read in the comparison.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


def convert(source: Path, model: Path, out: Path, dtype: str) -> None:
    """Write `out`. Raises what the script raises."""
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    from conversion import base  # type: ignore[import-not-found,unused-ignore]

    text_model = base.TextModel
    original = text_model.get_vocab_base_pre
    sentences = text_model._create_vocab_sentencepiece

    def name_of(self: Any, tokenizer: Any) -> str:
        try:
            return str(original(self, tokenizer))
        except NotImplementedError:
            return "gpt-2"

    def looked_for_first(self: Any) -> Any:
        if not (model / "tokenizer.model").is_file():
            raise FileNotFoundError(f"{model} has no tokenizer.model")
        return sentences(self)

    text_model.get_vocab_base_pre = name_of
    text_model._create_vocab_sentencepiece = looked_for_first
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(out), "--outtype", dtype]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

"""`python -I -m spd.cli.unpickle FOLDER` writes what pickles in it hold as safetensors; needs no NumPy."""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from spd.formats.names import WEIGHTS_FILE
from spd.formats.writer import OutputTensor, write_tensors


def main(folder: Path) -> None:
    """Read pytorch_model*.bin without running code of theirs, and write model.safetensors beside them."""
    from torch import load

    paths = sorted(folder.glob("pytorch_model*.bin"))
    found = [load(path, weights_only=True, map_location="cpu") for path in paths]
    outputs = [_output(name, tensor) for tensors in found for name, tensor in tensors.items()]
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        new = Path(partial) / WEIGHTS_FILE
        write_tensors(new, outputs)
        new.rename(folder / WEIGHTS_FILE)


def _output(name: str, tensor: Any) -> OutputTensor:
    code = re.sub(
        "loat|(?<=u)int|nt", "", str(tensor.dtype)[6:]
    ).upper()  # float32 is F32, uint8 is U8
    whole = tensor.contiguous()
    bytes_of = ctypes.string_at
    return OutputTensor(
        name, code, tensor.shape, lambda: iter([bytes_of(whole.data_ptr(), whole.nbytes)])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""`python -I -m spd.cli.unpickle FOLDER` converts pickled weights to safetensors without NumPy."""

from __future__ import annotations

import ctypes
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spd.formats.names import WEIGHTS_FILE
from spd.formats.writer import OutputTensor, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


def main(folder: Path) -> None:
    """Convert the folder's pytorch_model*.bin, without running their code, to model.safetensors."""
    from torch import load

    paths = sorted(folder.glob("pytorch_model*.bin"))
    checkpoints = [load(path, weights_only=True, map_location="cpu") for path in paths]
    outputs = [
        _output_tensor(name, tensor) for tensors in checkpoints for name, tensor in tensors.items()
    ]
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        weights_path = Path(partial) / WEIGHTS_FILE
        write_tensors(weights_path, outputs)
        weights_path.rename(folder / WEIGHTS_FILE)


def _output_tensor(name: str, tensor: Tensor) -> OutputTensor:
    """Return the description of a tensor for the writer of safetensors."""
    # float32 becomes F32, uint8 becomes U8.
    dtype_code = re.sub("loat|(?<=u)int|nt", "", str(tensor.dtype)[6:]).upper()
    contiguous = tensor.contiguous()
    bytes_of = ctypes.string_at
    return OutputTensor(
        name,
        dtype_code,
        tensor.shape,
        lambda: iter([bytes_of(contiguous.data_ptr(), contiguous.nbytes)]),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

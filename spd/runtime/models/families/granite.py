"""Granite 3 and 4 without recurrent layers, dense or with experts: embeddings, blocks, logits are scaled.

The stream is kept divided by what blocks are multiplied by, so that only embeddings and norms know.
"""

from __future__ import annotations

from spd.runtime.models.families import llama

layout = llama.layout

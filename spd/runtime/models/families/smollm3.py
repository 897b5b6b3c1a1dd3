"""SmolLM3: Llama, of whose layers every fourth knows no positions."""

from __future__ import annotations

from spd.runtime.models.families import llama

layout = llama.layout

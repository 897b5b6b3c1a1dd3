"""Ministral 3 and the text of Mistral Small 3.1 and later: Llama, whose queries grow with their position."""

from __future__ import annotations

from spd.runtime.models.families import llama

layout = llama.layout

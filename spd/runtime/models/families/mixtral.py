"""Mixtral: Llama with routed experts in every layer."""

from __future__ import annotations

from spd.runtime.models.families import llama

layout = llama.layout

"""Layers that keep a state instead of a cache: short convolutions and the gated delta rule."""

"""Speculation measured, judged and explained; the engine knows nothing of this room."""

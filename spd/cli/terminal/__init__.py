"""The terminal, its streams, and what is written there."""

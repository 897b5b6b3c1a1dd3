"""Routed experts."""

"""Benchmarks of `spd`: imported by nothing, not part of the wheel."""

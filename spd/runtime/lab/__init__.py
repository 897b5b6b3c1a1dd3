"""Measurements, explanations and checks; imported by the command line only."""

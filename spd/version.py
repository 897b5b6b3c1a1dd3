"""The version of spd."""

__version__ = "0.1.0"

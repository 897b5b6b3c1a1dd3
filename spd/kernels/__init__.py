"""Pure functions on tensors; each operation's contract and torch form live in `op.py`."""

"""Drafts by an EAGLE-3 head, which reads the target's residual stream between a few of its layers.

What it makes of a position's streams is stream 0; its own states go on from there, as those of an MTP
head of one module.
"""

from __future__ import annotations

from spd.runtime.proposers.head import HeadProposer


class Eagle3Proposer(HeadProposer):
    """One runner: the head's."""

    method = "eagle3"

"""Drafts by a target's own MTP modules, which read its hidden states after the final norm."""

from __future__ import annotations

from spd.runtime.proposers.head import HeadProposer


class MtpProposer(HeadProposer):
    """One runner a module of the checkpoint's, or a head folder's, MTP head."""

    method = "mtp"

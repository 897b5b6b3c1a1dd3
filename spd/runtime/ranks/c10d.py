"""Torch's own classes of stores and process groups, used without a process-wide group."""

from __future__ import annotations

from typing import Any

import torch
import torch._C._distributed_c10d

c10d: Any = torch._C._distributed_c10d
Store = torch._C._distributed_c10d.Store
TorchGroup = torch._C._distributed_c10d.ProcessGroup

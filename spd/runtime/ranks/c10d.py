"""Torch's classes for stores and process groups, as they are: without a process-wide group."""

from __future__ import annotations

from typing import Any

import torch
import torch._C._distributed_c10d

c10d: Any = torch._C._distributed_c10d

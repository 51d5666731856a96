"""The native engine on a CPU: Transformers in C++ kernels or packed PyTorch operations."""

from __future__ import annotations

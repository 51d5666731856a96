"""The native engine on a CPU: Transformers in kernels compiled for the machine, all else in torch's operations, weights laid out anew."""

from __future__ import annotations

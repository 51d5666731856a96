"""The native engine on a GPU: a Transformer in half precision, decoded by CUDA graphs."""

from __future__ import annotations

"""The native engine on a GPU: a Transformer in half precision whose steps are recorded once and replayed."""

from __future__ import annotations

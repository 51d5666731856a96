"""Triton kernels; each is called by the operation in `ops/` that it replaces."""

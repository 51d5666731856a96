"""Blocks, stacks, and the models assembled from a configuration; the decoding state."""

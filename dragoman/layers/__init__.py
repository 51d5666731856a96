"""Layers that blocks are made of: norms, feed-forward, residual connections, embeddings."""

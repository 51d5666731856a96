"""Reading corpora, the memory-mapped store, batches and their order, checks on data."""

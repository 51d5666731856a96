"""Training: trainer, train step, data loader, optimizer, learning-rate schedule, checkpoints."""

"""Training: loss, optimiser, schedule, loop, checkpoints, distribution, progress."""

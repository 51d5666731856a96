"""Tasks: what is an example, a batch, a loss, a metric, a prediction."""

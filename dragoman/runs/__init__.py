"""Training runs: what `dragoman train` does, from a configuration to a model directory."""

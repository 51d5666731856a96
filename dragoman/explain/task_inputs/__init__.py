"""Inputs of every task that can be explained: they run the model again with changed inputs."""

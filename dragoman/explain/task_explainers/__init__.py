"""How each task besides translation is explained: its model is run again with changed inputs."""

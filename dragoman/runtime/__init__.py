"""Runtime services: device selection, threads, memory, signals, standard streams and seeds."""

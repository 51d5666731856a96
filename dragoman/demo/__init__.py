"""The whole road in two minutes: a corpus made on the spot, a model trained on it, and a look inside."""

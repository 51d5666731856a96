"""Greedy, beam and sampling search over the step contract; it knows no model class."""

"""Recipes: one module per paper, with functions that return a configuration."""

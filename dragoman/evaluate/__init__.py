"""Scoring translations, and comparing systems."""

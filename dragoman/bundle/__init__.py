"""A bundle: the self-contained model directory that training writes and every other command takes."""

from dragoman.bundle.card import Card, Score
from dragoman.bundle.loading import Bundle
from dragoman.bundle.writing import write_bundle

__all__ = ["Bundle", "Card", "Score", "write_bundle"]

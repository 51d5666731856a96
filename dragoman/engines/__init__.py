"""What runs a model: one face, and behind it whatever can search for outputs."""

from dragoman.engines.face import Engine, Request
from dragoman.engines.native import Native

__all__ = ["Engine", "Native", "Request"]

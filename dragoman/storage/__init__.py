"""Crash-safe storage: atomic writes, manifests, directory locks, tensor files and the cache."""

from __future__ import annotations

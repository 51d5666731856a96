"""Files that are there whole or not at all: atomic publishing, manifests, the lock, and faults on purpose. No torch here."""

from __future__ import annotations

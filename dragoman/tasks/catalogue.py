"""The tasks by name; listing them imports no torch."""

from __future__ import annotations

from dragoman.registry import Entry, Registry

TASKS = Registry(
    "task",
    translate=Entry(
        "dragoman.tasks.translation:TranslationTask",
        "Sentences of one language into sentences of another.",
    ),
)

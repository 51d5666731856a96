"""Is a model sound? The promises that every model makes, checked on one: a list of small checks, each with its error and tolerance."""

from dragoman.doctor.checks import CHECKS, examine
from dragoman.doctor.finding import Finding
from dragoman.doctor.subject import Subject, load_subject

__all__ = ["CHECKS", "Finding", "Subject", "examine", "load_subject"]

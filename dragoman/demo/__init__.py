"""The demo: a generated corpus of dates, a small model trained on it, and its evaluation."""

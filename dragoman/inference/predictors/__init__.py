"""Predictors: they run trained models of every task but translation."""

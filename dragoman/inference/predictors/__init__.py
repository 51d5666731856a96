"""Predictors: what runs trained models of every task but translation."""

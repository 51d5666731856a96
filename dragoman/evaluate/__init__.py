"""Evaluation: sacreBLEU metrics and significance tests between systems."""

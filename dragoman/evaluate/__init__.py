"""Evaluation: BLEU, F1, accuracy and other metrics, significance tests, the NB-SVM baseline."""

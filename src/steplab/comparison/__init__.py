"""Compares records figure by figure: pure functions from stored samples to records.comparison."""

"""Predicts a step's memory and time from its spec, without running it or importing torch."""

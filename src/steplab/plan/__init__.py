"""Predictions from specs, without running a step or importing torch."""

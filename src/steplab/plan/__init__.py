"""Predictions for steps that need not be run: specs in, predictions out. Free of torch."""

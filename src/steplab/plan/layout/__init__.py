"""Predicts steps spread over ranks: each rank's memory, transfers and time, and the choice of a layout."""

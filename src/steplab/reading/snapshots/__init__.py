"""Allocator histories: read safely, replayed, and split by category, without torch."""

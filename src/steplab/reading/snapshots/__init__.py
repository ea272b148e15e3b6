"""Histories of an allocator: read safely, replayed, and broken down by category. This package does not use torch."""

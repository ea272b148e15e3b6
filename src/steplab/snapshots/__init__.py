"""Histories of an allocator are read safely, replayed, and broken down by category. This package does not use torch."""

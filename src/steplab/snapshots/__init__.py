"""Histories of an allocator: read safely, replayed, and told by category. Free of torch."""

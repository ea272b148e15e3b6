"""Turns a profiler's trace, of any make, into a Profile record.

A reader (kineto.py, nsys.py) turns a file into a Trace of columns; digest.py turns that into a
`records.profile.Profile`. Nothing here imports torch.
"""

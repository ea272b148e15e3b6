"""Turns a profiler's trace, of any make, into a Profile record.

A reader (kineto.py, nsys.py) turns a file into a Trace, which consists of columns only; digest.py turns a Trace into a
`records.profile.Profile`. Nothing here imports torch.
"""

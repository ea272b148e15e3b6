"""From a profiler's trace, whoever made it, to a Profile record.

A reader (kineto.py, nsys.py) turns a file into a Trace, which is columns and no more; digest.py turns a Trace into a
`records.profile.Profile`. Nothing here imports torch.
"""

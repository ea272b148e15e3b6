"""Build a Profile record from any profiler's trace. kineto.py and nsys.py read a file into a Trace of columns;
digest.py sums it up. Nothing here imports torch.
"""

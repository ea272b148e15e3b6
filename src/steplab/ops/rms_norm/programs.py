"""How rows are shared out to the programs of the backward kernel. It imports nothing, so that a plan may read it."""

NUM_PROGRAMS = 528
"""Programs, four on each multiprocessor of an H200. It is the same on every GPU, since it decides in which order the
weight's gradient is added up."""

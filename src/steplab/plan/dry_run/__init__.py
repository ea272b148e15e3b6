"""Runs a training step dry: the plain Transformer's operators, on tensors that have a size and no content.

`operators` and `attention` describe each operator, `transformer` is the model, and `tape` is autograd. `step` runs the
phases as measurement.step does, and `machine` reports them as one stream of `events`. `allocator` finds the peak
memory.
"""

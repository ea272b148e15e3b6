"""A dry run of a training step: the plain Transformer's operators on tensors that have a size and no content.

`operators` and `attention` describe each operator, `transformer` is the model, `tape` is autograd, and `step` runs the
phases as measurement.step does. `machine` reports one stream of `events`; `memory` keeps every allocation with its
formula and the caching allocator's rounding (`allocator`).
"""

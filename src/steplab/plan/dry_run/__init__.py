"""A training step run dry: the operators of the plain Transformer on tensors that have a size and no content.

`memory` is the ledger of who holds how many bytes, `tape` is autograd, `operators` and `attention` are what each
operator allocates, keeps for its backward pass and frees, `transformer` is the model in those operators, `step` runs
its phases as measurement.step does, and `allocator` is what torch's caching allocator adds. Every summand at the
highest moment is known by name, and by its formula in symbols.
"""

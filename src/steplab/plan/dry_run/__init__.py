"""A training step run dry: the operators of the plain Transformer on tensors that have a size and no content.

`operators` and `attention` are what each operator computes, moves, allocates, saves for its backward pass and frees,
`transformer` is the model in those operators, `tape` is autograd, and `step` runs the phases as measurement.step does.
`machine` tells all of it as one stream of `events`: operators with their sizes, FLOPs and bytes, and allocations.
`memory` is a listener that keeps who holds how many bytes, with what the caching allocator adds (`allocator`); every
summand at the highest moment is known by name, and by its formula in symbols.
"""

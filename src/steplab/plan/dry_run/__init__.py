"""A training step run dry: the operators of the plain Transformer on tensors that have a size and no content.

`memory` is the ledger of who holds how many bytes, `tape` is autograd, `operators` and `attention` are what each
operator allocates, keeps for its backward pass and frees, `transformer` is the model in those operators, `step` runs
its phases as measurement.step does. The sum at the highest moment is a closed form, of which every summand is known by
name and formula.
"""

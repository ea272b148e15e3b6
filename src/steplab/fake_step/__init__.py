"""A step of any model, run by torch on tensors without content, and told as the stream of events of plan.dry_run.

`step` builds and runs it as the measuring process does, under torch's FakeTensorMode; `watching` sees every operator
below autograd, forward and backward, and tells it as the dry run does; `storages` follows the memory of the tensors;
`cuda` has torch do on tensors of the CPU, which every build of torch can fake, what it does on CUDA.
"""

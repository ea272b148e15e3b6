"""A step of any model, run by torch on tensors without content, as a stream of plan.dry_run's events.

`step` builds and runs it as the measuring process does, under torch's FakeTensorMode. `watching` sees every operator
below autograd; `storages` follows the memory of tensors. `cuda` makes torch treat CPU tensors, which every build can
fake, as on CUDA.
"""

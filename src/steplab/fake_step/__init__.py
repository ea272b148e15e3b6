"""Traces a step of any model on torch's fake tensors, as a stream of plan.dry_run's events.

`step` builds and runs it as the measuring process does, under FakeTensorMode. `watching` sees every operator below
autograd, `storages` follows memory, and `cuda` makes torch treat CPU tensors, which every build can fake, as on CUDA.
"""

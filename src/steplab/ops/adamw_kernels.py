"""One step of AdamW over many tensors in two launches: a short one for the step's rates, and the update.

Each program of the update has a block of one tensor. One table assigns tensors to programs; another has the addresses,
because gradients may move in every step. Step counts and rates are in device memory, so replays of a CUDA graph go on
counting.
"""

import triton
import triton.language as tl


@triton.jit
def adamw_rates_kernel(addresses_ptr, settings_ptr, rates_ptr, num_tensors, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Add one to each tensor's step count, and compute its rates in float64 by the formulas of adamw.adamw_step.

    addresses [tensors, WIDTH]: the fifth is the tensor's step count, in float32. settings [4], float64: learning rate,
    logarithms of both betas, weight decay. rates [tensors, 3], float32, written: decay factor, step size, correction of
    the second moment.
    """
    tensors = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tensors < num_tensors
    number_ptr = tl.load(addresses_ptr + WIDTH * tensors + 4, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    number = tl.load(number_ptr, mask=inside, other=0.0) + 1
    tl.store(number_ptr, number, mask=inside)
    lr, decay = tl.load(settings_ptr), tl.load(settings_ptr + 3)
    first_lacks = tl.exp(number.to(tl.float64) * tl.load(settings_ptr + 1))
    second_lacks = tl.exp(number.to(tl.float64) * tl.load(settings_ptr + 2))
    row_ptr = rates_ptr + 3 * tensors
    tl.store(row_ptr, (1 - lr * decay).to(tl.float32), mask=inside)
    tl.store(row_ptr + 1, (lr / (1 - first_lacks)).to(tl.float32), mask=inside)
    tl.store(row_ptr + 2, (1 / tl.sqrt(1 - second_lacks)).to(tl.float32), mask=inside)


@triton.jit
def adamw_kernel(
    addresses_ptr,
    counts_ptr,
    firsts_ptr,
    tensors_ptr,
    rates_ptr,
    first_rate,
    second_rate,
    eps,
    BLOCK: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
):
    """Update a block of a parameter and its moments from its gradient, by the formula of adamw.adamw_step.

    addresses [tensors, 5]: parameter, gradient, first and second moment, each a multiple of 16 bytes and float32, and
    the step count. With masters [tensors, 6]: the parameter is the float32 master, the gradient is bfloat16, and the
    last is the bfloat16 weight, which is only written.

    counts [tensors]: elements. firsts [tensors]: the first program of each tensor. tensors [programs]: the index of
    each program's tensor. rates: from adamw_rates_kernel. first_rate and second_rate are one minus beta.
    """
    program = tl.program_id(0)
    tensor = tl.load(tensors_ptr + program).to(tl.int64)
    start = (program - tl.load(firsts_ptr + tensor)) * BLOCK
    rest = tl.load(counts_ptr + tensor) - start
    decay, step_size = tl.load(rates_ptr + 3 * tensor), tl.load(rates_ptr + 3 * tensor + 1)
    second_correction = tl.load(rates_ptr + 3 * tensor + 2)
    row_ptr = addresses_ptr + (6 if HAS_MASTERS else 5) * tensor
    gradient_type: tl.constexpr = tl.bfloat16 if HAS_MASTERS else tl.float32
    parameter_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.float32)), 16) + start
    gradient_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(gradient_type)), 16) + start
    first_ptr = tl.multiple_of(tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32)), 16) + start
    second_ptr = tl.multiple_of(tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32)), 16) + start
    if HAS_MASTERS:
        weight_ptr = tl.multiple_of(tl.load(row_ptr + 5).to(tl.pointer_type(tl.bfloat16)), 16) + start
    else:
        weight_ptr = parameter_ptr
    if rest >= BLOCK:  # the compiler sees a constant here, without a mask
        _update(
            parameter_ptr, gradient_ptr, first_ptr, second_ptr, weight_ptr, BLOCK,
            decay, first_rate, second_rate, step_size, second_correction, eps, BLOCK, HAS_MASTERS,
        )  # fmt: skip
    else:
        _update(
            parameter_ptr, gradient_ptr, first_ptr, second_ptr, weight_ptr, rest,
            decay, first_rate, second_rate, step_size, second_correction, eps, BLOCK, HAS_MASTERS,
        )  # fmt: skip


@triton.jit
def _update(
    parameter_ptr,
    gradient_ptr,
    first_ptr,
    second_ptr,
    weight_ptr,
    count,
    decay,
    first_rate,
    second_rate,
    step_size,
    second_correction,
    eps,
    BLOCK: tl.constexpr,
    HAS_MASTERS: tl.constexpr,
):
    places = tl.arange(0, BLOCK)
    inside = places < count
    gradient = tl.load(gradient_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    first = tl.load(first_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first")
    second = tl.load(second_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first")
    parameter = tl.load(parameter_ptr + places, mask=inside, other=0.0, eviction_policy="evict_first")
    first += first_rate * (gradient - first)
    second += second_rate * (gradient * gradient - second)
    denominator = tl.sqrt_rn(second) * second_correction + eps
    parameter = parameter * decay - step_size * (first / denominator)
    tl.store(first_ptr + places, first, mask=inside, eviction_policy="evict_first")
    tl.store(second_ptr + places, second, mask=inside, eviction_policy="evict_first")
    tl.store(parameter_ptr + places, parameter, mask=inside, eviction_policy="evict_first")
    if HAS_MASTERS:
        tl.store(weight_ptr + places, parameter.to(tl.bfloat16), mask=inside, eviction_policy="evict_first")

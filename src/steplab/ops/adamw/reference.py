"""AdamW as the formula reads (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2)."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The numbers of one step."""

    lr: float
    beta_1: float
    beta_2: float
    eps: float
    weight_decay: float
    step: int
    """Number of the step, counted from 1."""

    @property
    def decay(self) -> float:
        """What is left of a parameter."""
        return 1 - self.lr * self.weight_decay

    @property
    def step_size(self) -> float:
        """The learning rate over what the first moment lacks for having begun at zero."""
        return self.lr / (1 - self.beta_1**self.step)

    @property
    def second_correction(self) -> float:
        """One over the root of what the second moment lacks."""
        return float((1 - self.beta_2**self.step) ** -0.5)


def adamw_step(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rates: Rates) -> None:
    """Update a parameter and its two moments in place."""
    first.add_((1 - rates.beta_1) * (gradient - first))
    second.add_((1 - rates.beta_2) * (gradient.square() - second))
    denominator = second.sqrt() * rates.second_correction + rates.eps
    parameter.mul_(rates.decay).sub_(rates.step_size * (first / denominator))

"""Counts elements of tensors that became zero, subnormal or infinite, and which of them are a loss.

The fp32 run leaves one byte per element (zero, tiny, finite, infinite, not a number), with which the run under audit is
compared.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from steplab.records.numerics import Elements

_ZERO, _TINY, _FINITE, _INFINITE, _NAN = 0, 1, 2, 3, 4
_NUM_COUNTS = 7
_LOWEST_EXPONENT, _NUM_EXPONENTS = -160, 320  # fp32: subnormals from 2^-149, numbers below 2^128


@dataclass(slots=True)
class Tally:
    """Sums counts over several tensors; the counts stay on the device until they are read."""

    num_elements: int = 0
    _counts: list[Tensor] = field(default_factory=list)
    _extremes: list[Tensor] = field(default_factory=list)
    _was_compared: bool = True

    def add(self, tensor: Tensor, reference: Tensor | None) -> None:
        """Count a floating-point tensor; `reference` is what `kinds_of` returned for it in the fp32 run."""
        x = tensor.detach()
        if x.numel() == 0:
            return
        self.num_elements += x.numel()
        magnitude, zero, nan, infinite = x.abs(), x == 0, torch.isnan(x), torch.isinf(x)
        normal = torch.finfo(x.dtype).smallest_normal
        masks = [infinite, nan, zero, ~zero & (magnitude < normal)]
        if reference is None:
            self._was_compared = False
        else:
            masks.append((infinite | nan) & (reference <= _FINITE))
            masks.append(zero & (reference > _ZERO) & (reference < _NAN))
            masks.append(zero & (reference == _TINY))
        counts = [torch.count_nonzero(mask) for mask in masks]
        counts += [torch.zeros_like(counts[0])] * (_NUM_COUNTS - len(counts))
        self._counts.append(torch.stack(counts))
        largest = torch.where(infinite | nan, 0, magnitude).max()
        smallest = torch.where(zero | nan, torch.inf, magnitude).min()
        self._extremes.append(torch.stack((largest, smallest)))

    def elements(self) -> Elements | None:
        """The counts; None if nothing was counted."""
        if not self.num_elements:
            return None
        counts = torch.stack(self._counts).sum(0).tolist()
        infinite, nan, zero, subnormal, overflowed, underflowed, below_range = counts
        extremes = [pair.tolist() for pair in self._extremes]
        largest, smallest = max(pair[0] for pair in extremes), min(pair[1] for pair in extremes)
        return Elements(
            num_elements=self.num_elements,
            num_inf=infinite,
            num_nan=nan,
            num_zero=zero,
            num_subnormal=subnormal,
            num_overflowed=overflowed if self._was_compared else None,
            num_underflowed=underflowed if self._was_compared else None,
            num_below_range=below_range if self._was_compared else None,
            largest=largest if infinite + nan < self.num_elements else None,
            smallest=smallest if smallest != torch.inf else None,
        )


def kinds_of(tensor: Tensor, low: torch.dtype) -> Tensor:
    """One byte per element: zero, tiny (so small that it is zero in the type `low`), finite, infinite or not a
    number."""
    x = tensor.detach()
    kinds = torch.full(x.shape, _FINITE, dtype=torch.uint8, device=x.device)
    kinds[x.to(low) == 0] = _TINY
    kinds[x == 0] = _ZERO
    kinds[torch.isinf(x)] = _INFINITE
    kinds[torch.isnan(x)] = _NAN
    return kinds


class Exponents:
    """Counts the elements between 2^e and 2^(e+1), for each e."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, tensor: Tensor) -> None:
        """Count the finite elements of a tensor that are not zero."""
        x = tensor.detach().float().flatten()
        x = x[torch.isfinite(x) & (x != 0)]
        exponents = torch.frexp(x).exponent - 1  # frexp's fraction lies between 1/2 and 1
        found = torch.bincount(exponents.long() - _LOWEST_EXPONENT, minlength=_NUM_EXPONENTS)
        self._counts = found if self._counts is None else self._counts + found

    def counts(self) -> tuple[tuple[int, int], ...]:
        """(e, count) for each e that occurred, ascending."""
        found = self._counts.tolist() if self._counts is not None else []
        return tuple((index + _LOWEST_EXPONENT, count) for index, count in enumerate(found) if count)

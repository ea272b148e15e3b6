"""Errors of attention's output and gradients against float64, next to plain attention's errors in the same number
format.

Heads are independent, so some are checked in full if all would take too long. Queries go in pieces, so that not all
scores have to fit.

Shape suffixes: B batch, H query heads, G heads of keys and values, R = H/G query heads per shared head, S query
positions, K key positions, D head dimension; s a piece of S.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from steplab.ops.attention.plain import plain_attention
from steplab.records.attention import TensorError
from steplab.specs.attention import AttentionSpec
from steplab.units import MIB

RESULTS = ("output", "queries", "keys", "values")
"""Names of the output and of the inputs' gradients."""
_MOST_SCORES = {"cuda": 60_000_000_000, "cpu": 50_000_000}
_MOST_BYTES = 256 * MIB
_PIECE_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    batch: int
    group: int
    exact: tuple[Tensor, ...]


class Reference:
    """Some heads' float64 output and gradients."""

    def __init__(self, spec: AttentionSpec, inputs: Inputs) -> None:
        self._repeats = spec.heads // spec.num_kv_heads
        self._heads: list[_Head] = []
        self.plain: dict[str, _Distance] | None = None
        """Plain attention's errors by name of RESULTS; None until measured, and if it runs out of memory."""
        places = [(batch, group) for batch in range(spec.batch) for group in range(spec.num_kv_heads)]
        scores = spec.queries * spec.num_keys * self._repeats
        most = _MOST_SCORES[inputs.q.device.type] // scores
        head_bytes = 2 * 8 * spec.dim * (self._repeats * spec.queries + spec.num_keys)
        for batch, group in _spread(places, min(most, max(1, _MOST_BYTES // head_bytes))):
            with torch.no_grad():
                exact = _exact(*self._head(inputs, batch, group), causal=spec.causal)
            self._heads.append(_Head(batch=batch, group=group, exact=exact))

    @property
    def checked_heads(self) -> int:
        """Number of query heads checked; 0 if one head would take too long."""
        return len(self._heads) * self._repeats

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for head in self._heads for tensor in head.exact)

    def look_at_plain(self, spec: AttentionSpec, inputs: Inputs) -> None:
        """Measure plain attention's error. Raises torch's error if it runs out of memory."""
        found = {name: _Distance() for name in RESULTS}
        for head in self._heads:
            q_RSD, k_KD, v_KD, do_RSD = self._head(inputs, head.batch, head.group)
            leaves = [tensor.detach().clone().requires_grad_() for tensor in (q_RSD, k_KD, v_KD)]
            o_RSD = plain_attention(leaves[0], leaves[1], leaves[2], causal=spec.causal)
            results = (o_RSD.detach(), *torch.autograd.grad(o_RSD, leaves, do_RSD))
            for name, result, exact in zip(RESULTS, results, head.exact, strict=True):
                found[name].add(result, exact)
        self.plain = found

    def errors(self, output: Tensor, gradients: tuple[Tensor, ...]) -> tuple[TensorError, ...]:
        found = {name: _Distance() for name in RESULTS[: 1 + len(gradients)]}
        for head in self._heads:
            queries = slice(head.group * self._repeats, (head.group + 1) * self._repeats)
            results = [output[head.batch, queries]]
            if gradients:
                dq, dk, dv = gradients
                results += [dq[head.batch, queries], dk[head.batch, head.group], dv[head.batch, head.group]]
            for distance, result, exact in zip(found.values(), results, head.exact, strict=False):
                distance.add(result, exact)
        return tuple(
            TensorError(
                tensor=name,
                max_abs=distance.max_abs,
                relative=distance.relative,
                plain_max_abs=self.plain[name].max_abs if self.plain else None,
                plain_relative=self.plain[name].relative if self.plain else None,
            )
            for name, distance in found.items()
            if self._heads
        )

    def _head(self, inputs: Inputs, batch: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        queries = slice(group * self._repeats, (group + 1) * self._repeats)
        return (
            inputs.q.detach()[batch, queries],
            inputs.k.detach()[batch, group],
            inputs.v.detach()[batch, group],
            inputs.do[batch, queries],
        )


class _Distance:
    def __init__(self) -> None:
        self._max_abs = self._square = self._whole_square = 0.0

    def add(self, result: Tensor, exact: Tensor) -> None:
        difference = result.detach().double() - exact
        largest = float(difference.abs().max())
        self._max_abs = largest if math.isnan(largest) else max(self._max_abs, largest)
        self._square += float(difference.square().sum())
        self._whole_square += float(exact.square().sum())

    @property
    def max_abs(self) -> float | None:
        return self._max_abs if math.isfinite(self._square) else None

    @property
    def relative(self) -> float | None:
        if not math.isfinite(self._square) or not self._whole_square:
            return None
        return math.sqrt(self._square / self._whole_square)


def _spread(places: list[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    if len(places) <= most:
        yield from places
    elif most == 1:
        yield places[-1]
    else:
        yield from (places[round(index * (len(places) - 1) / (most - 1))] for index in range(most))


def _exact(q_RSD: Tensor, k_KD: Tensor, v_KD: Tensor, do_RSD: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Output and gradients in float64 (Dao 2023, "FlashAttention-2", section 2.2)."""
    q_RSD, k_KD, v_KD, do_RSD = (tensor.double() for tensor in (q_RSD, k_KD, v_KD, do_RSD))
    num_heads, num_queries, dim = q_RSD.shape
    num_keys = k_KD.shape[0]
    scale = 1 / math.sqrt(dim)
    o_RSD, dq_RSD = torch.empty_like(q_RSD), torch.empty_like(q_RSD)
    dk_KD, dv_KD = torch.zeros_like(k_KD), torch.zeros_like(v_KD)
    piece = max(1, _PIECE_BYTES // (8 * num_keys))
    key_K = torch.arange(num_keys, device=q_RSD.device)
    for head in range(num_heads):
        for first in range(0, num_queries, piece):
            rows = slice(first, min(first + piece, num_queries))
            q_sD, do_sD = q_RSD[head, rows], do_RSD[head, rows]
            scores_sK = q_sD @ k_KD.T * scale
            if causal:
                query_s = torch.arange(rows.start, rows.stop, device=q_RSD.device)
                scores_sK.masked_fill_(key_K > query_s[:, None], -math.inf)
            p_sK = scores_sK.softmax(dim=-1)
            o_sD = p_sK @ v_KD
            dv_KD += p_sK.T @ do_sD
            ds_sK = p_sK * (do_sD @ v_KD.T - (do_sD * o_sD).sum(-1, keepdim=True)) * scale
            o_RSD[head, rows], dq_RSD[head, rows] = o_sD, ds_sK @ k_KD
            dk_KD += ds_sK.T @ q_sD
    return o_RSD, dq_RSD, dk_KD, dv_KD

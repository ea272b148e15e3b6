"""FlashAttention-2 in tiled PyTorch, to be read with the paper: Dao 2023, "FlashAttention-2", algorithms 1 and 2.

It rounds where a kernel on tensor cores does: operands of products, P and dS among them, to the inputs' type. Products
and sums are in float32 (float64 for float64). A row without keys, or with only -inf scores, gives zeros and a
log-sum-exp of -inf; +inf and NaN give NaN.

Shape suffixes: B batch, N key heads, R query heads that share one key head, S query positions, K key positions, D head
dimension; s and t a tile of queries and of keys. H = N R query heads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

TILE = 64
_INFINITY = float("inf")


def reference_forward(
    q_BHSD: Tensor, k_BNKD: Tensor, v_BNKD: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, laid out as q, and each row's log-sum-exp, [B, H, S] in float32 (float64 for float64).

    Algorithm 1. A row's softmax is a quotient of two sums over the keys. Both are taken tile by tile, and scaled down
    each time a higher score turns up ("online softmax").
    """
    wide = _wide(q_BHSD.dtype)
    o_BHSD = torch.empty_like(q_BHSD)
    lse_BHS = torch.empty(q_BHSD.shape[:-1], dtype=wide, device=q_BHSD.device)
    num_keys = k_BNKD.shape[2]
    for rows in _tiles(q_BHSD.shape[2]):
        q_BNRsD = _grouped(q_BHSD[:, :, rows], k_BNKD).to(wide)
        sum_BNRsD = torch.zeros_like(q_BNRsD)
        highest_BNRs1 = q_BNRsD.new_full((*q_BNRsD.shape[:-1], 1), -_INFINITY)
        normaliser_BNRs1 = torch.zeros_like(highest_BNRs1)
        for columns in _tiles(num_keys):
            if causal and columns.start >= rows.stop:
                break
            k_BN1tD, v_BN1tD = (x[:, :, None, columns].to(wide) for x in (k_BNKD, v_BNKD))
            scores_BNRst = _scores(q_BNRsD, k_BN1tD, rows, columns, causal=causal, scale=scale)
            before_BNRs1, highest_BNRs1 = (
                highest_BNRs1,
                torch.maximum(highest_BNRs1, scores_BNRst.amax(-1, keepdim=True)),
            )
            # With no score above -inf yet, -inf - (-inf) would be NaN: any finite number will do.
            base_BNRs1 = highest_BNRs1.masked_fill(highest_BNRs1 == -_INFINITY, 0)
            weights_BNRst = (scores_BNRst - base_BNRs1).exp()
            shrink_BNRs1 = (before_BNRs1 - base_BNRs1).exp()
            normaliser_BNRs1 = normaliser_BNRs1 * shrink_BNRs1 + weights_BNRst.sum(-1, keepdim=True)
            sum_BNRsD = sum_BNRsD * shrink_BNRs1 + _rounded(weights_BNRst, q_BHSD.dtype) @ v_BN1tD
        divisor_BNRs1 = normaliser_BNRs1.masked_fill(normaliser_BNRs1 == 0, 1)
        o_BHSD[:, :, rows] = (sum_BNRsD / divisor_BNRs1).flatten(1, 2).to(q_BHSD.dtype)
        lse_BHS[:, :, rows] = (highest_BNRs1 + normaliser_BNRs1.log()).squeeze(-1).flatten(1, 2)
    return o_BHSD, lse_BHS


def reference_backward(
    do_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BNKD: Tensor,
    v_BNKD: Tensor,
    o_BHSD: Tensor,
    lse_BHS: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each laid out as its tensor.

    Algorithm 2. The weights are recomputed from the scores: P = exp(S - log-sum-exp). With dP = dO V^T the scores'
    gradient is dS = P * (dP - D), where D = rowsum(P * dP) = rowsum(dO * O) is one number a row.
    """
    wide, dtype = _wide(q_BHSD.dtype), q_BHSD.dtype
    d_BNRS1 = _grouped((do_BHSD.to(wide) * o_BHSD.to(wide)).sum(-1, keepdim=True), k_BNKD)
    # A row of -inf only: its weights are exp(-inf - 0) = 0.
    lse_BNRS1 = _grouped(lse_BHS.masked_fill(lse_BHS == -_INFINITY, 0).unsqueeze(-1), k_BNKD)
    q_BNRSD, do_BNRSD = (_grouped(x, k_BNKD).to(wide) for x in (q_BHSD, do_BHSD))
    dq_BNRSD = torch.zeros_like(q_BNRSD)
    dk_BNKD, dv_BNKD = torch.empty_like(k_BNKD), torch.empty_like(v_BNKD)
    for columns in _tiles(k_BNKD.shape[2]):
        k_BN1tD, v_BN1tD = (x[:, :, None, columns].to(wide) for x in (k_BNKD, v_BNKD))
        dk_BNRtD, dv_BNRtD = (torch.zeros_like(x.expand(-1, -1, q_BNRSD.shape[2], -1, -1)) for x in (k_BN1tD, v_BN1tD))
        for rows in _tiles(q_BHSD.shape[2]):
            if causal and columns.start >= rows.stop:
                continue
            q_BNRsD, do_BNRsD = q_BNRSD[..., rows, :], do_BNRSD[..., rows, :]
            scores_BNRst = _scores(q_BNRsD, k_BN1tD, rows, columns, causal=causal, scale=scale)
            weights_BNRst = (scores_BNRst - lse_BNRS1[..., rows, :]).exp()
            dv_BNRtD += _rounded(weights_BNRst, dtype).mT @ do_BNRsD
            dweights_BNRst = do_BNRsD @ v_BN1tD.mT
            dscores_BNRst = _rounded(weights_BNRst * (dweights_BNRst - d_BNRS1[..., rows, :]), dtype)
            dq_BNRSD[..., rows, :] += dscores_BNRst @ k_BN1tD
            dk_BNRtD += dscores_BNRst.mT @ q_BNRsD
        dk_BNKD[:, :, columns] = (dk_BNRtD.sum(2) * scale).to(dtype)
        dv_BNKD[:, :, columns] = dv_BNRtD.sum(2).to(dtype)
    dq_BHSD = torch.empty_like(q_BHSD)
    dq_BHSD.copy_((dq_BNRSD * scale).flatten(1, 2))
    return dq_BHSD, dk_BNKD, dv_BNKD


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


def _grouped(x_BHSE: Tensor, k_BNKD: Tensor) -> Tensor:
    """Reshape [B, N R, S, any] to [B, N, R, S, any]: query heads grouped by the key head that they read."""
    num_key_heads = k_BNKD.shape[1]
    return x_BHSE.unflatten(1, (num_key_heads, x_BHSE.shape[1] // max(num_key_heads, 1)))


def _tiles(num_positions: int) -> Iterator[slice]:
    for start in range(0, num_positions, TILE):
        yield slice(start, min(start + TILE, num_positions))


def _scores(q_BNRsD: Tensor, k_BN1tD: Tensor, rows: slice, columns: slice, *, causal: bool, scale: float) -> Tensor:
    """scale * q k^T of a tile; -inf for keys after the query's own position."""
    scores_BNRst = q_BNRsD @ k_BN1tD.mT * scale
    if not causal or columns.stop - 1 <= rows.start:
        return scores_BNRst
    positions_s1 = torch.arange(rows.start, rows.stop, device=q_BNRsD.device)[:, None]
    positions_t = torch.arange(columns.start, columns.stop, device=q_BNRsD.device)
    return scores_BNRst.masked_fill(positions_t > positions_s1, -_INFINITY)

"""A linear layer's loss in float64, and elementwise error bounds for other formats, from roundings alone.

With u the format's unit roundoff and e float32's (sums):

    logits      off by u |x| (rounded once) + C e (|h| |W|^T) (a sum of C products)
    lse         off by at most the row's largest logit error E; exponentials and their sum add e (4 (|x| + |lse|) + V),
                so each softmax is off by a factor of exp(±2 E)
    G           off by the consequence, and rounded to the format once
    d hidden    off by G's error times |W|, a sum of V products and a rounding; d W likewise, rounded once a chunk
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Results = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    weights_of_losses: Tensor | None = None


def make_case(
    num_tokens: int,
    width: int,
    num_entries: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    bias: bool = False,
    reduction: str = "mean",
    ignored: float = 0.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    hidden = torch.randn(num_tokens, width, device=device)
    weight = torch.randn(num_entries, width, device=device) * 1.5 / width**0.5
    targets = torch.randint(num_entries, (num_tokens,), device=device)
    targets[torch.rand(num_tokens, device=device) < ignored] = -100
    return Case(
        hidden=hidden.to(dtype),
        weight=weight.to(dtype),
        bias=torch.randn(num_entries, device=device).to(dtype) if bias else None,
        targets=targets,
        reduction=reduction,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        weights_of_losses=torch.randn(num_tokens, device=device) if reduction == "none" else None,
    )


def exact_and_bounds(
    case: Case,
    dtype: torch.dtype,
    *,
    num_chunks: int = 1,
    gradient_of_weight: torch.dtype | None = None,
    truncated: bool = False,
) -> tuple[Results, Results]:
    """float64 results, and each element's allowed error for products in `dtype`.

    `gradient_of_weight`: format in which its chunks are summed; None: `dtype`. `truncated`: G is cut off instead of
    rounded, as in Triton's interpreter for bf16.
    """
    h, w = case.hidden.double(), case.weight.double()
    if dtype != case.weight.dtype:  # rounded first, as under autocast
        h, w = case.hidden.to(dtype).double(), case.weight.to(dtype).double()
    b = torch.zeros(len(w), device=w.device, dtype=torch.float64) if case.bias is None else case.bias.double()
    u, e, tiny = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2, torch.finfo(dtype).smallest_normal
    tiny *= u  # half the distance of subnormal numbers
    valid = case.targets != case.ignore_index
    entries, smoothing, z = len(w), case.label_smoothing, case.z_loss

    x = h @ w.T + b
    lse = x.logsumexp(1, keepdim=True)
    softmax = (x - lse).exp()
    wanted = one_hot(case.targets.clamp(0, entries - 1), entries) * (1 - smoothing) + smoothing / entries
    losses = ((lse - (wanted * x).sum(1, keepdim=True)) + z * lse.square()).squeeze(1) * valid
    count = valid.sum().clamp(min=1)
    scale = {"mean": 1 / count, "sum": torch.ones(()), "none": case.weights_of_losses}[case.reduction]
    assert scale is not None
    scale = (scale.to(h.device).double() * valid).unsqueeze(1)
    G = (softmax * (1 + 2 * z * lse) - wanted) * scale

    off_x = u * x.abs() + h.shape[1] * e * (h.abs() @ w.abs().T + b.abs())
    E = off_x.amax(1, keepdim=True) + e * (4 * (x.abs().amax(1, keepdim=True) + lse.abs()) + entries)
    off_losses = 2 * E + z * (2 * lse.abs() * E + E.square()) + 4 * e * (lse.abs() + z * lse.square())
    off_losses = off_losses.squeeze(1) * valid
    off_G = softmax * (((2 * E).exp() - 1) * (1 + 2 * z * lse.abs()) + 2 * z * E) + 4 * e * (softmax + wanted)
    off_G = (
        off_G * scale.abs()
        + (2 if truncated else 1) * u * G.abs()
        + tiny * valid.unsqueeze(1) * (1 if case.reduction != "mean" else scale)
    )

    u_w = torch.finfo(gradient_of_weight or dtype).eps / 2
    sums_h, sums_w = G.abs() @ w.abs(), G.abs().T @ h.abs()
    sums_of_parts = 0 if entries % 8 == 0 else 1  # the last entries are multiplied apart, and added
    exact = {"loss": losses, "hidden": G @ w, "weight": G.T @ h, "bias": G.sum(0)}
    bounds = {
        "loss": off_losses,
        "hidden": off_G @ w.abs() + entries * e * sums_h + u * (exact["hidden"].abs() + sums_of_parts * sums_h),
        "weight": off_G.T @ h.abs() + len(h) * e * sums_w + num_chunks * u_w * sums_w,
        "bias": off_G.sum(0) + len(h) * e * G.abs().sum(0) + u * exact["bias"].abs(),
    }
    if case.reduction != "none":
        divisor = count if case.reduction == "mean" else 1
        exact["loss"] = losses.sum() / divisor
        bounds["loss"] = off_losses.sum() / divisor + len(h) * e * losses.sum() / divisor
    return exact, {name: bound + tiny for name, bound in bounds.items()}


def assert_within(found: Results, exact: Results, bounds: Results) -> None:
    for name, result in found.items():
        off = (result.double() - exact[name]).abs()
        worst = (off / bounds[name]).max() if off.numel() else 0.0
        assert (off <= bounds[name]).all(), f"{name}: {worst:.3g} times the bound"

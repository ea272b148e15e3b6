"""Where LayerNorm errs in low formats: the figures of docs/precision.md, against float64."""

import pytest
import torch
from torch import Tensor

WIDTH, EPS = 768, 1e-5


def inputs(dtype: torch.dtype, mean: float = 8.0, deviation: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(1024, WIDTH, dtype=torch.float64, generator=generator) * deviation + mean).to(dtype)


def exact(x: Tensor) -> Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()


def of_operators(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + EPS)


def of_running_sums(x: Tensor) -> Tensor:
    def mean(terms: Tensor) -> Tensor:
        total = torch.zeros(len(terms), dtype=terms.dtype)
        for column in terms.unbind(-1):
            total = total + column
        return (total / terms.shape[-1])[:, None]

    centred = x - mean(x)
    return centred * torch.rsqrt(mean(centred * centred) + EPS)


def error(found: Tensor, x: Tensor) -> float:
    right = exact(x)
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize(("dtype", "rounded"), [(torch.bfloat16, 2e-3), (torch.float16, 2.5e-4)])
def test_the_fused_kernel_rounds_its_output_and_no_sum(dtype: torch.dtype, rounded: float) -> None:
    x = inputs(dtype)
    fused = torch.nn.functional.layer_norm(x, (WIDTH,), eps=EPS)
    assert (fused == exact(x).to(dtype)).double().mean() > 0.99
    assert error(fused, x) < 1.01 * error(exact(x).to(dtype), x) < rounded


def test_low_operators_and_low_sums_err_more() -> None:
    bf16, fp16 = inputs(torch.bfloat16), inputs(torch.float16)
    assert 0.01 < error(of_operators(bf16), bf16) < 0.02
    assert 0.001 < error(of_operators(fp16), fp16) < 0.003
    assert error(of_running_sums(bf16), bf16) > 1
    assert 0.01 < error(of_running_sums(fp16), fp16) < 0.04


def test_squares_overflow_in_fp16_alone() -> None:
    fp16, bf16 = (inputs(dtype, mean=0.0, deviation=300.0) for dtype in (torch.float16, torch.bfloat16))
    assert not of_operators(fp16).any()
    assert error(of_operators(bf16), bf16) < 0.01

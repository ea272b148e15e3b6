"""The roofline of a device: by hand for the H200, as measured elsewhere, and what the documents say of it."""

from pathlib import Path

import pytest

from steplab.costs.operators import Tensor, operator_cost
from steplab.costs.roofline import Roofline
from steplab.specs.hardware import hardware_named

H200 = Roofline(hardware=hardware_named("H200 SXM"))
DOCUMENT = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()


def test_the_ridge_is_the_peak_over_the_bandwidth() -> None:
    assert H200.ridge("fp32") == pytest.approx(67e12 / 4.8e12)
    assert H200.ridge("bf16") == pytest.approx(989e12 / 4.8e12, rel=1e-3)
    assert H200.ridge("fp64") is None


def test_the_least_time_is_that_of_the_lower_roof() -> None:
    ridge = H200.ridge("fp32")
    assert ridge is not None
    for intensity in (ridge / 10, ridge, 10 * ridge):
        least_s = H200.least_time_s(intensity * 1e9, 1e9, "fp32")
        assert least_s == pytest.approx(1e9 / 4.8e12 * max(1.0, intensity / ridge))
    assert H200.least_time_s(1.0, 1.0, "fp64") is None


def test_an_unlisted_device_has_no_roof() -> None:
    unknown = Roofline(hardware=None)
    assert (unknown.peak("fp32"), unknown.bandwidth(), unknown.ridge("fp32")) == (None, None, None)
    assert unknown.citations(["fp32"]) == []


def test_the_document_has_softmax_below_the_ridge_and_the_product_above() -> None:
    """At 1024 positions and head dimension 64, in fp32."""
    q, k = Tensor(shape=(1, 1024, 64), item_bytes=4), Tensor(shape=(1, 64, 1024), item_bytes=4)
    product = operator_cost("aten::bmm", [q, k])
    softmax = operator_cost("aten::_softmax", [Tensor(shape=(1, 1024, 1024), item_bytes=4)])
    ridge = H200.ridge("fp32")
    assert product is not None
    assert product.flops is not None
    assert softmax is not None
    assert softmax.flops is not None
    assert ridge is not None
    assert softmax.flops / softmax.moved_bytes == 5 / 8 < ridge < product.flops / product.moved_bytes
    told = " ".join(DOCUMENT.split())
    assert f"5 FLOPs for 8 bytes, the product {product.flops / product.moved_bytes:.0f} for each" in told
    assert f"the ridge of an H200 in fp32 is at {ridge:.0f}" in told

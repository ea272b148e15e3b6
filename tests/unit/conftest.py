import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def torch_settings_put_back() -> Iterator[None]:
    """Restores torch's process-wide options, which measuring sets."""
    import torch

    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture(scope="module")
def earlier_tests_left_no_garbage() -> None:
    """Collect and freeze: searches took half a second after leaky tests."""
    gc.collect()
    gc.freeze()

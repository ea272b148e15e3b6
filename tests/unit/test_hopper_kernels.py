import importlib.metadata
import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from steplab.ops.attention import hopper_kernels, triton_trial
from steplab.ops.attention.choice_rule import choose
from steplab.ops.attention.hopper_kernels import TRIED, is_tried, planned_on, release, remedy, too_old
from steplab.ops.attention.triton_trial import why_not_hopper

TABLE = Path(__file__).parents[1] / "golden" / "hopper_kernels.json"


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trial, "_tried", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_trial, "refuse_while_capturing", lambda device: None)


@pytest.mark.parametrize(
    ("version", "old", "tried"),
    [
        ("3.5.1", True, False),
        ("3.6.0", False, True),
        ("3.9.0+git1", False, True),
        ("3.10.0", False, False),
        ("x", True, False),
    ],
)
def test_a_version_is_too_old_tried_or_new(version: str, old: bool, tried: bool) -> None:
    assert (too_old(version), is_tried(version)) == (old, tried)


def test_the_table_has_every_kernel_of_every_tried_version_without_a_failure() -> None:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    kernels = [
        {(row["kernel"], row["columns"]) for row in rows if release(row["triton"]) == version} for version in TRIED
    ]
    assert all(each == kernels[0] and len(each) > 15 for each in kernels)
    assert all(row["registers"] <= 255 and row["shared_bytes"] <= 232448 for row in rows), "of an H100's limits"


def test_the_installed_triton_is_in_the_table() -> None:
    """Add another by `python tests/hopper_modules.py --table tests/golden/hopper_kernels.json`."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    installed = importlib.metadata.version("triton")
    assert release(installed) in {release(row["triton"]) for row in rows}
    assert is_tried(installed)


def test_a_triton_nobody_tried_is_tried_once_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(triton_trial, "_fault", lambda device, head_dim: asked.append(head_dim))
    assert [why_not_hopper("99.0.0", dim) for dim in (64, 64, 80)] == [None] * 3
    assert asked == [64, 80]
    assert why_not_hopper("3.7.1") is None
    assert why_not_hopper("3.5.1") == "Triton 3.5.1 is too old for them"
    assert asked == [64, 80], "of these the answer is known"


def test_a_failed_trial_warns_once_with_the_versions_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_trial, "_fault", lambda device, head_dim: "dQ by 0.7 off")
    with pytest.warns(
        RuntimeWarning, match=r"portable .* Triton 99\.0\.0: dQ by 0\.7 off; install a torch .* 3\.6 to 3\.9"
    ):
        assert why_not_hopper("99.0.0") == "they do not work with Triton 99.0.0: dQ by 0.7 off"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert why_not_hopper("99.0.0") is not None


def test_auto_leaves_flash_triton_out_where_its_portable_kernels_run() -> None:
    def chosen(dtype: str, *, hopper: bool) -> str:
        shape = partial(choose, device="NVIDIA H200", head_dim=64, num_queries=4096, num_keys=4096, causal=True)
        return shape(dtype=dtype, hopper=hopper).implementation

    assert (chosen("bfloat16", hopper=True), chosen("bfloat16", hopper=False)) == ("flash_triton", "sdpa_cudnn")
    assert chosen("float32", hopper=True) == chosen("float32", hopper=False), "whose kernels are portable in any case"


@pytest.mark.parametrize(
    ("gpu", "installed", "expected"),
    [
        ("H200 SXM", None, True),
        ("NVIDIA H100 80GB HBM3", "3.9.0", True),
        ("NVIDIA H100 80GB HBM3", "3.4.0", False),
        ("A100 SXM 80GB", None, False),
        ("B200", None, False),
    ],
)
def test_plans_count_on_hopper_kernels_on_hopper_gpus(
    gpu: str, installed: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_kernels, "installed_triton", lambda: installed)
    assert planned_on(gpu) is expected


def test_what_to_install() -> None:
    assert remedy("3.5.1") == "install torch 2.10 or newer, which brings Triton 3.6 or newer"
    assert remedy("4.0.0") == "install a torch that brings Triton 3.6 to 3.9"

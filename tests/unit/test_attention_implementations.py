import itertools
import re
from pathlib import Path

import pytest
import torch
from tests.test_architecture import BLOCKED, in_a_fresh_process

from steplab.ops.attention.api import IMPLEMENTATIONS, attention
from steplab.ops.attention.implementations import DTYPES, NAMES, TABLE, Implementation, implementation, why_not
from steplab.ops.errors import Unsupported
from steplab.specs.step import CHOICES

DOCUMENT = Path(__file__).parents[2] / "docs" / "attention.md"
ON_CPU = [row for row in TABLE if "cpu" in row.devices]
BY_NAME = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)


def test_every_row_has_its_function_and_every_choice_its_row() -> None:
    assert tuple(IMPLEMENTATIONS) == NAMES == CHOICES["attention"]
    assert len(set(NAMES)) == len(NAMES)


def test_the_table_is_read_without_torch() -> None:
    in_a_fresh_process(f"{BLOCKED}\nimport steplab.ops.attention.implementations")


def test_the_help_of_run_names_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    from steplab.cli.app import main

    assert main(["run", "--help"]) == 0
    told = " ".join(re.sub(r"[│╭╰─]", " ", capsys.readouterr().out).split())
    for row in TABLE:
        assert row.name in told


@BY_NAME
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cpu_takes_what_the_table_says(row: Implementation, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for head_dim, lengths, causal, heads in itertools.product((4, 20, 264), ((1, 1), (5, 5), (3, 7)), (0, 1), (1, 2)):
        queries, keys = lengths
        q = torch.randn(1, 2, queries, head_dim, dtype=getattr(torch, dtype))
        k = torch.randn(1, heads, keys, head_dim, dtype=getattr(torch, dtype))
        why = why_not(
            row.name, device="cpu", dtype=DTYPES[dtype], head_dim=head_dim, num_queries=queries, num_keys=keys,
            causal=bool(causal), grouped=heads == 1,
        )  # fmt: skip
        if why is None and row.name != "flex":  # which compiles for seconds a shape: tests of its own
            assert attention(q, k, k, causal=bool(causal), implementation=row.name).shape == q.shape
        elif why is not None:
            with pytest.raises(Unsupported):
                attention(q, k, k, causal=bool(causal), implementation=row.name)


@pytest.mark.parametrize("row", ON_CPU, ids=lambda row: row.name)
def test_what_is_saved_for_backward_is_what_the_table_says(row: Implementation) -> None:
    B, H, S, D = 1, 2, 48, 8
    q, k, v = (torch.randn(B, H, S, D, requires_grad=True) for _ in range(3))
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if not row.trains_on_cpu:
            with pytest.raises(Unsupported, match="gradients on a CPU"):
                attention(q, k, v, implementation=row.name)
            return
        o = attention(q, k, v, implementation=row.name)
    scores = [tensor for tensor in saved if tensor.shape[-2:] == (S, S)]
    assert bool(scores) == row.materialises_scores
    if not row.materialises_scores:
        storages = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in saved if tensor.numel() > 2}
        assert sorted(storages.values()) == sorted([*[B * H * S * D] * 4, B * H * S]), "q, k, v, o and the log-sum-exp"
        assert o.untyped_storage().data_ptr() in storages


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("sdpa_flash", {"dtype": "fp32"}, "that kernel takes bf16 and fp16 alone"),
        ("sdpa_flash", {"head_dim": 257}, "heads of at most 256, and these are 257 wide"),
        ("sdpa_cudnn", {"head_dim": 12}, "heads of a multiple of 8"),
        ("sdpa_cudnn", {"num_queries": 1, "num_keys": 1}, "no context of a single token"),
        ("sdpa_efficient", {"dtype": "fp64"}, "that kernel takes fp32, bf16 and fp16 alone"),
        ("sdpa_efficient", {"head_dim": 6, "dtype": "fp32"}, "heads of a multiple of 4"),
        ("sdpa_efficient", {"grouped": True}, "no grouped-query heads"),
        ("flash_attn_4", {"causal": True, "num_keys": 9}, "counts positions from the last"),
        ("flex", {"num_keys": 0}, "no empty sequence"),
        ("flash_triton", {"device": "mps"}, "it has no kernel for mps; it is for cuda"),
        ("sdpa_cudnn", {"device": "rocm"}, "it has no kernel for rocm; it is for cuda"),
        ("sdpa_efficient", {"device": "rocm", "head_dim": 12}, "heads of a multiple of 8"),
    ],
)
def test_what_is_not_taken_says_why(name: str, fields: dict[str, object], said: str) -> None:
    served: dict[str, object] = {"device": "cuda", "dtype": "bf16", "head_dim": 64, "num_queries": 8, "num_keys": 8}
    assert why_not(name, **served) is None  # type: ignore[arg-type]
    assert said in str(why_not(name, **(served | fields)))  # type: ignore[arg-type]


def test_the_document_has_the_facts_of_the_table() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][: len(TABLE)]
    assert [cells[0].strip("`") for cells in rows] == list(NAMES)
    for cells in rows:
        row = implementation(cells[0].strip("`"))
        _, _, needs, saved, same = cells
        for fact, words in (
            (len(row.dtypes) < len(DTYPES) or not row.trains_on_cpu, "CUDA"),
            ("rocm" not in row.devices, "NVIDIA"),
            (row.package is not None, str(row.package)),
            (len(row.dtypes) < len(DTYPES), ", ".join(row.dtypes)),
            (row.widest is not None, f"head dimension up to {row.widest}"),
            (not row.grouped, "no grouped heads"),
            (not row.single_token, "more than a single token"),
        ):
            assert (words in needs) == fact, (row.name, words)
        assert saved.startswith((row.saved, "as "))
        assert same == {True: "yes", False: "no", None: "–"}[row.deterministic]

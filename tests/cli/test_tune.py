"""steplab tune, as users type it."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.cli.program import Program, complaint
from tests.runs import ENVIRONMENT

from steplab.cli.app import main
from steplab.lab import tuning as lab
from steplab.measurement.progress import OnProgress
from steplab.ops.attention.triton_tuning import read_table
from steplab.records.attention_tuning import AttentionTuning, TileTrial
from steplab.specs.attention_tuning import KERNELS, TileCandidate, TuningStudy, timed_shapes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(steplab: Program) -> None:
    result = steplab("tune", "attention")
    assert "tuning attention here is not supported: flash_triton's kernels need CUDA" in complaint(result, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dim", "wide"), "--dim takes whole numbers, as in 64,128, not 'wide'"),
        (("--dtype", "fp16"), "tiles are not tuned in 'fp16'; choose bf16, whose tiles serve fp16 too, or fp32"),
        (("--dim", "64,512"), "head dimension must be from 1 to 256 for flash_triton, not 512"),
        (("--tiles", __file__), "exists and is not a table of tiles; name another file, or add --force"),
        (("--tiles", "nowhere/tiles.toml"), "there is no folder nowhere"),
        (("--output", "table.toml"), "the suffix .toml is not that of a format"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["tune", "attention", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes as many milliseconds as it has stages."""

    def tuned(study: TuningStudy, on_progress: OnProgress) -> AttentionTuning:
        assert study in (TuningStudy(head_dims=(128,)), TuningStudy(head_dims=(128,), dtype="fp32"))
        of_type = {"variant": "portable", "bits": 32} if study.dtype == "fp32" else {"variant": "hopper", "bits": 16}
        trials = tuple(
            TileTrial(
                candidate=TileCandidate(kernel=kernel, box=128, queries=128, keys=64, stages=stages, **of_type),  # type: ignore[arg-type]
                shape=shape,
                device_s=(1e-3 * stages,) * 3,
                flops=1e12,
            )
            for kernel in KERNELS
            for stages in (2, 3)
            for shape in timed_shapes(128, study.dtype)
        )
        found = AttentionTuning(study=study, gpu="NVIDIA H200", environment=ENVIRONMENT)
        return dataclasses.replace(found, trials=trials)

    monkeypatch.setattr(lab, "tuning_in_child", tuned)


@pytest.mark.usefixtures("measured")
def test_rows_are_shown_or_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tune", "attention", "--dim", "128", "--format", "csv"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("chosen") == 2 * 3
    assert shown.err.count("[[tiles]]") == 3
    assert f"--tiles FILE writes these rows to a copy of {lab.packaged_table()}" in shown.err

    path = tmp_path / "tiles.toml"
    for _ in range(2):  # a table of tiles is continued
        assert main(["tune", "attention", "--dim", "128", "--tiles", str(path)]) == 0
    mine = "NVIDIA H200", 16, 128
    rows = [row for row in read_table(path.read_text()) if (row.gpu, row.bits, row.box) == mine]
    assert [(row.kernel, row.stages) for row in rows] == [(kernel, 2) for kernel in KERNELS]
    others = {row for row in read_table(lab.packaged_table().read_text()) if row.gpu != "NVIDIA H200"}
    assert others <= set(read_table(path.read_text()))


@pytest.mark.usefixtures("measured")
def test_rows_of_32_bits_are_written_for_fp32(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tiles.toml"
    assert main(["tune", "attention", "--dim", "128", "--dtype", "fp32", "--tiles", str(path)]) == 0
    assert "32 bits" in capsys.readouterr().out
    before = read_table(lab.packaged_table().read_text())
    new = [row for row in read_table(path.read_text()) if row not in before]
    assert [(row.kernel, row.gpu, row.bits, row.stages) for row in new] == [
        (kernel, "NVIDIA H200", 32, 2) for kernel in KERNELS
    ]
    assert {row for row in before if row.bits == 16} <= set(read_table(path.read_text()))

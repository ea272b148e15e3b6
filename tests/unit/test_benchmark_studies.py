"""The studies in benchmarks/ are made of steps and benchmarks that exist, for as many GPUs as they say."""

from pathlib import Path

import pytest

from steplab.specs.study import load_study

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = sorted({*BENCHMARKS.glob("*.toml")} - {BENCHMARKS / "attention_dims.toml"})


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_loads_and_takes_all_gpus(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCHMARKS.parent)
    study = load_study(str(path), {})
    sizes = {cell.layout.world_size for cell in study.cells} | {part.options.get("gpus", 1) for part in study.parts}
    assert sizes == {study.gpus}

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks import loss_curves

ARGUMENTS = ["--device=cpu", "--model=tiny", "--context=8", "--batch=1", "--steps=4", "--seeds", "0", "1"]


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> Iterator[str]:
        yield "def f(x):\n    return x + 1\n" * 40

    monkeypatch.setattr(loss_curves, "source_text", text)


def test_variants_of_a_seed_begin_alike_and_a_fast_one_passes(
    short_text: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "losses.json"
    assert loss_curves.main([*ARGUMENTS, "--output", str(output)]) == 0
    curves = loss_curves.joined([json.loads(output.read_text())])
    [plain] = [
        words for name, words in json.loads(output.read_text())["commands"].items() if name == loss_curves.REFERENCE
    ]
    assert plain == "steplab run --model tiny --batch 1 --context 8 --optimizer adamw_loop --device cpu"
    first = {name: [of_seeds[seed][0] for seed in (0, 1)] for name, of_seeds in curves.items()}
    reference = first[loss_curves.REFERENCE]
    assert reference[0] != reference[1]
    for losses in first.values():
        assert losses == pytest.approx(reference, rel=1e-5)  # sums of a thousand numbers in fp32
    assert "chunked loss" in capsys.readouterr().out


def test_files_of_single_seeds_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (2, 3, 40))
    paths = []
    for seed in range(3):
        losses = {
            loss_curves.REFERENCE: noise[0, seed],
            "close": noise[0, seed] + 0.1 * noise[1, seed],
            "worse": noise[0, seed] + 0.2,
        }
        if seed < 2:
            losses["ended early"] = noise[0, seed]
        curves = {name: {str(seed): list(values)} for name, values in losses.items()}
        paths.append(tmp_path / f"{seed}.json")
        commands = {"worse": "steplab run --model tiny"}
        paths[-1].write_text(json.dumps({"about": "synthetic", "commands": commands, "curves": curves}))
    whole = tmp_path / "all.json"
    assert loss_curves.main(["--read", *map(str, paths), "--output", str(whole)]) == 1
    assert loss_curves.joined([json.loads(whole.read_text())])["worse"].keys() == {0, 1, 2}
    assert json.loads(whole.read_text())["commands"] == commands
    with pytest.raises(
        ValueError, match="worse is 'steplab run --model tiny' in one file and 'steplab run' in another"
    ):
        loss_curves.commands_of([{"commands": commands}, {"commands": {"worse": "steplab run"}}])
    told = capsys.readouterr()
    rows = {line.split("|")[1].strip(): line for line in told.out.splitlines() if line.startswith("|")}
    assert rows["close"].endswith("| yes |")
    assert rows["worse"].endswith("| no |")
    assert "ended early" not in rows
    assert "ended early: left out" in told.err


def test_figures_are_those_of_the_definition() -> None:
    reference = np.array([[1.0, 2.0], [3.0, 6.0]])  # standard deviations sqrt(2) and 2 sqrt(2)
    found = loss_curves.beside(reference, reference + np.array([[0.5, 1.0], [-0.5, 2.0]]))
    assert found.seeds == pytest.approx(np.array([2**0.5, 2 * 2**0.5]))
    assert found.paired == pytest.approx(np.array([0.5, 2.5**0.5]))
    assert (found.end_seeds, found.end_paired) == pytest.approx((2 * 2**0.5, 1.5))
    assert found.passes
    assert not loss_curves.beside(reference, reference + 3.0).passes


def test_the_table_of_the_docs_is_that_of_the_committed_losses(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[2]
    assert loss_curves.main(["--read", str(root / "benchmarks" / "results" / "loss_curves_h200_202611.json")]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "\n".join(table) in (root / "docs" / "advise.md").read_text(encoding="utf-8")

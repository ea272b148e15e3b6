import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.attention_records import make_benchmark, make_cell
from tests.rendering import render_page
from tests.stored_lines import fill
from tests.stored_records import stored
from tests.sure import sure

from steplab.errors import UserError
from steplab.lab.attention import account_for_memory, attention_study
from steplab.ops.attention import peers as others
from steplab.ops.errors import Unsupported
from steplab.plan.attention_memory import account_of_failure
from steplab.records.attention import AttentionRun
from steplab.records.failure import Failure
from steplab.records.registry import summary_row
from steplab.records.timing import PhaseSamples
from steplab.report.attention.document import account_document, attention_verdict, report_against
from steplab.report.attention.figures import account_table, default_peer, mean_speeds, speed_table, time_ratio
from steplab.report.kit.document import Table
from steplab.report.kit.rendering import render
from steplab.report.kit.table import sheet
from steplab.report.run.columns import list_document
from steplab.specs.resolve import Grid


def render_attention(
    run: AttentionRun, format: str = "table", *, against: str | None = None, width: int | None = None
) -> str:
    return render(report_against(against).document(run), format, width=width)


def texts_of(table: Table) -> tuple[list[str], list[tuple[str, ...]]]:
    shown = sheet(table)
    return [column.heading for column in shown.columns], list(shown.rows)


@pytest.fixture(scope="module")
def peers() -> AttentionRun:
    return make_benchmark("peers")


# --- figures ----------------------------------------------------------------------------------------------


def test_speeds_stand_beside_a_peer_where_there_is_another_that_was_timed(peers: AttentionRun) -> None:
    table = sure(speed_table(peers.cells, "flex", "both"))
    assert sum(text == "out of memory" for row in texts_of(table)[1] for text in row) == 6
    assert speed_table(peers.cells, None, "both") is not None
    alone = [cell for cell in peers.cells if cell.spec.implementation == "flex"]
    assert speed_table(alone, None, "both") is None
    assert speed_table([make_cell(cell.spec, passes=()) for cell in peers.cells], None, "both") is None


def test_a_median_is_marked_where_half_of_the_samples_scatter_and_not_for_a_few_that_do(peers: AttentionRun) -> None:
    flex, ours = (
        next(cell.spec for cell in peers.cells if cell.spec.implementation == name) for name in ("flex", "flash_triton")
    )
    steady = (1e-3,) * 7 + (5e-3, 9e-3)  # quartiles 1 and 1 ms
    waiting = (1e-3, 1e-3, 1e-3, 1.1e-3, 1.2e-3, 1.4e-3, 1.6e-3, 2e-3, 3e-3)  # quartiles 1 and 1.6 ms, median 1.2 ms

    def shown(samples: tuple[float, ...]) -> tuple[str, str]:
        timed = {flex: steady, ours: samples}
        cells = [make_cell(spec, passes=(PhaseSamples(phase="both", device_s=found),)) for spec, found in timed.items()]
        table = sure(speed_table(cells, "flex", "both"))
        return " ".join(texts_of(table)[1][0][-3:]), table.caption

    assert shown(steady)[0] == "1.00 ms 1.00 ms 1.00×"
    assert "~" not in shown(steady)[1]
    text, caption = shown(waiting)
    assert text == "1.00 ms ~1.20 ms 0.83×"
    assert "~ marks a median whose interquartile range exceeds 20% of it" in caption


def test_one_shape_whose_interval_contains_one_is_said_to_decide_nothing(peers: AttentionRun) -> None:
    shape = next(cell.spec.shape for cell in peers.cells if cell.samples("both"))
    even = (1.0e-3, 1.4e-3, 0.8e-3, 1.3e-3, 0.9e-3, 1.2e-3, 1.1e-3)

    def told(factor: float) -> str:
        cells = []
        for cell in peers.cells:
            if cell.spec.shape == shape and cell.spec.implementation in ("flex", "sdpa_flash"):
                times = factor if cell.spec.implementation == "flex" else 1.0
                both = PhaseSamples(phase="both", device_s=tuple(times * second for second in even))
                cells.append(dataclasses.replace(cell, passes=(both,)))
        return attention_verdict(dataclasses.replace(peers, cells=tuple(cells)), "sdpa_flash").sentences[0]

    between = r"0\.95× \(0\.\d\d× to 1\.\d\d×\), at 1 shape, 95 % interval\."
    beside = re.escape("flex is faster than FlashAttention-2 (sdpa_flash) in forward + backward: ")
    assert re.fullmatch(f"Not decided whether {beside}{between}", told(1.05))
    assert told(3.0).startswith("flex is 0.33× (")


def test_repeats_that_took_turns_are_compared_pair_by_pair_and_others_are_not(peers: AttentionRun) -> None:
    drift = tuple(1e-3 * 1.1**repeat for repeat in range(16))
    spec = next(cell.spec for cell in peers.cells)
    peer = make_cell(spec, passes=(PhaseSamples(phase="both", device_s=drift),))
    cell = make_cell(spec, passes=(PhaseSamples(phase="both", device_s=tuple(0.9 * time_s for time_s in drift)),))
    turns = dataclasses.replace(cell, interleaved=(spec.column,))
    assert time_ratio(cell, peer, "both").decision == "undecided"
    found = time_ratio(turns, peer, "both")
    assert found.decision == "lower"
    assert found.ratio == pytest.approx(0.9)


def timed(samples: Mapping[str, Sequence[float]], lengths: Sequence[int], **overrides: Any) -> AttentionRun:
    run = make_benchmark(None, {"implementation": list(samples), "sequence": list(lengths)})
    cells = [
        make_cell(spec, passes=(PhaseSamples(phase="both", device_s=tuple(samples[spec.implementation])),))
        for spec in run.study.cells
    ]
    return dataclasses.replace(run, cells=tuple(cells), **overrides)


LOADED = (1e-4, 1.1e-4, 1e-4, 1.2e-4, 5e-3, 6e-3, 1e-4, 5e-3)
STEADY = (1e-3, 1.01e-3) * 5


def test_means_whose_intervals_contain_one_are_said_to_decide_nothing() -> None:
    run = timed({"sdpa": STEADY, "plain": LOADED, "flex": [2 * time_s for time_s in STEADY]}, [64, 128])
    first, second = attention_verdict(run, "sdpa").sentences
    assert first == (
        "flex is 0.50× ± 0.01 as fast as sdpa in forward + backward: geometric mean of 2 shapes, 95 % interval."
    )
    expected = (
        r"Not decided whether plain is faster than sdpa in forward \+ backward: \d+\.\d\d× \(0\.\d\d× to "
        r"\d+\.\d\d×\), geometric mean of 2 shapes, 95 % interval\."
    )
    assert re.fullmatch(expected, second)
    assert not any(
        "as fast" in text
        for text in attention_verdict(timed({"sdpa": STEADY, "plain": LOADED}, [64]), "sdpa").sentences
    )


@pytest.mark.parametrize(
    ("of_256", "of_64", "said"),
    [
        ((0.2, 3.0) * 5, 0.5, "faster than sdpa on 1 of 3 shapes and slower on 1 (neither on 1): 0.50× (at "),
        ((0.985,) * 10, 2.0, "0.63× ± 0.01 as fast as sdpa in forward + backward: geometric mean of 3 shapes, 95 %"),
    ],
)
def test_shapes_that_do_not_decide_or_differ_by_a_trifle_are_told_apart_from_those_that_do(
    of_256: tuple[float, ...], of_64: float, said: str
) -> None:
    run = timed({"sdpa": STEADY, "flex": STEADY}, [64, 128, 256])
    factors = {64: (of_64,) * 10, 128: (2.0,) * 10, 256: of_256}
    cells = []
    for cell in run.cells:
        if cell.spec.implementation == "flex":
            times = tuple(map(operator.mul, factors[cell.spec.queries], STEADY))
            cell = dataclasses.replace(cell, passes=(PhaseSamples(phase="both", device_s=times),))
        cells.append(cell)
    (told,) = attention_verdict(dataclasses.replace(run, cells=tuple(cells)), "sdpa").sentences
    assert told.startswith(f"flex is {said}")


def test_auto_that_chose_the_peer_is_told_by_the_choice_and_not_by_a_ratio() -> None:
    run = timed({"sdpa": STEADY, "auto": LOADED}, [64, 128])

    def told(*chosen: str) -> tuple[str, ...]:
        autos = [cell for cell in run.cells if cell.spec.implementation == "auto"]
        noted = {
            cell.spec: dataclasses.replace(cell, notes=(f"auto is {name}: the table says so",))
            for cell, name in zip(autos, chosen, strict=True)
        }
        cells = tuple(noted.get(cell.spec, cell) for cell in run.cells)
        return attention_verdict(dataclasses.replace(run, cells=cells), "sdpa").sentences

    chose = "auto chose sdpa on every shape: their times differ by the choosing, or by noise."
    assert told("sdpa", "sdpa") == (chose,)
    assert told("sdpa", "sdpa_flash")[0].startswith("Not decided whether auto is faster than sdpa")


def test_nothing_is_compared_where_there_is_nobody_else(peers: AttentionRun) -> None:
    alone = [cell for cell in peers.cells if cell.spec.implementation == "flex"]
    assert default_peer(alone) is None
    assert default_peer([cell for cell in peers.cells if cell.spec.implementation in ("flex", "sdpa_flash")])
    assert mean_speeds(alone, None) is None
    assert "vs" not in render_attention(make_benchmark("peers", {"implementation": ["flex"]}), width=200)


# --- shown ------------------------------------------------------------------------------------------------


def test_a_page_has_curves_over_lengths_and_marks_what_failed() -> None:
    lists: Grid = {"implementation": ["plain", "sdpa_flash"], "sequence": [256, 1024, 16384], "dim": [16, 64]}
    study = make_benchmark("study", lists)
    page = render_page([study], title="Attention")
    assert '<section id="attention">' in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(pictures) == 5 * 2  # three passes, memory kept and peak; a panel a head dimension
    assert all(">16384<" in picture.replace(" ", "") for picture in pictures)
    first = next(cell for cell in study.cells if cell.spec.column == "plain, compiled")
    rate = first.flops["forward"] / median(first.samples("forward"))
    assert f"8×1×256×16 fp32 plain, compiled: {rate / 1e12:.2f} TFLOP/s" in page
    assert page.count("8×1×16384×64 fp32 plain: out of memory") == 4  # in backward, both, and both kinds of memory


def test_shapes_that_do_not_differ_in_length_alone_stand_side_by_side(peers: AttentionRun) -> None:
    page = render_page([peers], title="Attention")
    assert "<svg" not in page
    assert page.count('<ol class="bars">') >= 5


def test_an_account_sums_to_the_bytes_it_states() -> None:
    account = sure(account_of_failure(make_benchmark("study").cells, 20 * 1024**3, "a GPU"))
    rows = account_table(account).rows
    sizes = [row["num_bytes"] for row in rows]
    assert sum(size for size in sizes[:-1] if isinstance(size, int)) == sizes[-1] == account.total_bytes
    for row in rows[:-1]:
        assert isinstance(row["element_bytes"], int)
        assert math.prod(map(int, str(row["shape"]).split("×"))) * row["element_bytes"] == row["num_bytes"]
    text = render(account_document(account), width=140)
    assert "The smallest plain attention that does not fit: 8×1×16384×16 fp32" in text
    assert "B H S K e" in text
    assert "The device's error was: asked for 64.0 GiB more" in text


# --- what is missing --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def h100() -> dict[str, AttentionRun]:
    return {record.id: record for record in stored("other_gpu_h100", AttentionRun)}


def test_an_interrupted_benchmark_says_so_beside_the_answer(h100: dict[str, AttentionRun]) -> None:
    run = h100["57924f079633"]
    warning = "the benchmark was interrupted: 68 of 74 cells had ended, and the record has only these."
    assert attention_verdict(run, "sdpa_flash").cautions[0] == f"Warning: {warning}"
    text = " ".join(render_attention(run, width=100).split())
    assert text.index(warning) < text.index("Mean speed")
    row = summary_row(run)
    assert (row["num_cells"], len(run.cells), row["warnings"]) == (74, 68, "interrupted")
    assert re.search(rf"{run.id} .* interrupted\b", render(list_document([row, summary_row(h100["d78775b6e11a"])])))


def test_an_interrupted_benchmark_without_any_time_says_so_too(peers: AttentionRun) -> None:
    cells = tuple(
        make_cell(cell.spec, passes=(), failure=Failure(kind="error", message="no")) for cell in peers.cells[:2]
    )
    told = attention_verdict(dataclasses.replace(peers, cells=cells), None)
    assert told.sentences == ("2 of 2 cells failed.",)
    assert told.cautions[0].startswith("Warning: the benchmark was interrupted: 2 of 35 cells had ended")


def test_cells_without_their_package_are_told_as_that_and_not_as_failures(
    h100: dict[str, AttentionRun], peers: AttentionRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention_verdict(h100["0e7f66aa0984"], "sdpa_flash").sentences[1:] == (
        "flash-attn-4 is not installed: 6 cells were not run.",
    )

    def told(error: ImportError) -> tuple[str, str]:
        def absent(name: str) -> None:
            raise error

        monkeypatch.setattr(others, "refuse_unserved", lambda *given, **more: None)
        monkeypatch.setattr(others, "import_module", absent)
        q = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
        with pytest.raises(Unsupported) as raised:
            others.flash_attn_4_attention(q, q, q)
        failed = make_cell(peers.cells[0].spec, passes=(), failure=Failure(kind="error", message=str(raised.value)))
        whole = dataclasses.replace(peers, cells=(failed, *peers.cells[1:]))
        return raised.value.args[1], attention_verdict(whole, "sdpa_flash").sentences[1]

    why, said = told(ModuleNotFoundError("No module named 'flash_attn'"))
    assert why == "flash-attn-4 cannot be imported (No module named 'flash_attn')"
    assert said == "flash-attn-4 is not installed: 1 cell was not run."
    for broken in ("No module named 'cutlass'", "libcute.so: undefined symbol"):
        assert "not installed" not in told(ImportError(broken))[1]


# --- what is asked ----------------------------------------------------------------------------------------


def test_a_laptop_gets_a_small_grid_and_a_gpu_the_peers() -> None:
    laptop, gpu = (attention_study({"device": device}) for device in ("cpu", "cuda"))
    assert (laptop.name, gpu.name) == ("tiny", "peers")
    assert {cell.implementation for cell in laptop.cells} == {"plain", "sdpa", "flash_reference"}
    assert {cell.implementation for cell in gpu.cells} == {"sdpa_flash", "flex", "sdpa_cudnn", "flash_triton"}
    lists = attention_study({"sequence": ["8", "16"], "implementation": ["plain"], "device": "cpu", "repeats": 3})
    assert [cell.label for cell in lists.cells] == ["1×1×8×64 fp32", "1×1×16×64 fp32"]
    assert (lists.least_repeats, lists.most_repeats) == (3, 3)
    with pytest.raises(UserError, match="pass 'sideways' is not known"):
        attention_study({"device": "cpu", "pass": ("sideways",)})


def test_an_account_is_computed_for_a_gpu_or_taken_from_the_store(tmp_path: Path) -> None:
    cells = attention_study({"grid": "long", "device": "cuda"}).cells
    assert account_for_memory(cells, "H200 SXM").spec.queries == 131072
    path = tmp_path / "store.db"
    fill(path, make_benchmark("peers", {"implementation": ["flex"]}))
    with pytest.raises(UserError, match="plain attention ran out of memory in no stored benchmark"):
        account_for_memory(cells, None, store=path)
    study = make_benchmark("study")
    fill(path, study)
    found = account_for_memory(cells, None, store=path)
    assert (found.spec.queries, found.memory_source) == (16384, f"NVIDIA H200 (record {study.id})")


def test_a_benchmark_all_of_whose_cells_failed_is_no_success() -> None:
    study = make_benchmark("study", {"implementation": ["plain"]})
    failed = [make_cell(cell.spec) for cell in study.cells if cell.spec.queries == 16384]
    assert study.status == "ok"
    assert make_benchmark("study", cells=tuple(failed)).status == "out_of_memory"

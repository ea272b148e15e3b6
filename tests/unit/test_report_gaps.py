import re
from dataclasses import replace

import pytest
from tests.rendering import render_page, rows_text, run_text, sheet_of
from tests.runs import make_run, out_of_memory, recorder_run

from steplab.records.rows import run_row
from steplab.records.run import Run
from steplab.records.timing import PhaseSamples, Timing
from steplab.report.run.one_run import choices, doubts, gaps
from steplab.specs.resolve import resolve_step
from steplab.units import format_share

NO_PEAK = "no fp32 peak is known for a CPU; `steplab doctor` measures one for later runs"
OVER = "MFU over 100 %: the ceiling `steplab doctor` measured is below what the step reached"


def read(page: str) -> str:
    return page.replace("\u00a0", " ").replace("<code>", "`").replace("</code>", "`")


def without_a_peak() -> Run:
    run = make_run()
    used = tuple(replace(u, peak_flops_per_s=None, value=None, peak_source=NO_PEAK) for u in run.utilizations)
    return replace(run, utilizations=used)


def factory_run() -> Run:
    run = make_run()
    spec = resolve_step({"model": "examples.my_model:build"})
    return replace(run, spec=spec, utilizations=tuple(u for u in run.utilizations if u.kind == "hfu"))


def test_an_unknown_peak_is_why_there_is_no_mfu() -> None:
    assert f"MFU and HFU: {NO_PEAK}" in gaps(without_a_peak())
    page = read(render_page([without_a_peak()], title="t"))
    assert NO_PEAK in page[page.index('id="missing"') : page.index('id="environment"')].replace("\u00a0", " ").replace(
        "<code>", "`"
    ).replace("</code>", "`")
    text = " ".join(run_text(without_a_peak(), width=100).split())
    assert f"- MFU and HFU: {NO_PEAK}" in text[text.index("Not measured") :]


def test_a_factorys_step_says_why_it_has_no_mfu() -> None:
    (reason,) = [text for text in gaps(replace(factory_run(), model=None)) if text.startswith("MFU")]
    assert reason == "MFU: its factory returns a whole step, in which the forward pass is not told apart"
    uncounted = replace(factory_run(), utilizations=(), notes=("MFU and HFU: counting the FLOPs failed: why",))
    assert [text for text in gaps(uncounted) if "FU" in text] == list(uncounted.notes)


@pytest.mark.parametrize("run", [make_run(), out_of_memory(), recorder_run()], ids=["ok", "failed", "loop"])
def test_no_reason_is_made_up(run: Run) -> None:
    assert gaps(run) == [*run.notes, "memory clock: NVML did not say"]


def test_a_share_that_cannot_be_is_told_beside_the_shares_and_not_as_a_gap() -> None:
    run = replace(make_run(), notes=(OVER, "peak device memory: not kept"))
    assert doubts(run) == [OVER]
    assert OVER not in gaps(run)
    text = run_text(run, width=200)
    assert text.index("Utilization") < text.rindex(OVER) < text.index("Environment")
    page = read(render_page([run], title="t"))
    assert page.index('id="utilization"') < page.index(OVER) < page.index('id="environment"')
    assert page.count(OVER) == 1


@pytest.mark.parametrize(("value", "said"), [(1.13, True), (1.0, False), (0.4, False), (None, False)])
def test_a_table_with_such_a_share_says_so(value: float | None, said: bool) -> None:
    caption = sheet_of([run_row(make_run()) | {"mfu": value, "hfu": 0.5}]).caption
    assert ("above 100 %" in caption) == said


def test_a_factorys_peak_is_in_the_table_too() -> None:
    row = run_row(factory_run())
    assert row["mfu"] is None
    assert (row["peak_flops_per_s"], row["peak_source"]) == (67e12, "NVIDIA H200 data sheet, 2024, dense")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.000154, "0.015 %"), (0.00004, "0.004 %"), (0.0009, "0.09 %"), (0.0011, "0.1 %"), (0.4312, "43.1 %"),
        (0.0, "0.0 %"), (1.129, "112.9 %"), (-0.0002, "-0.02 %"), (3e-8, "<0.0001 %"),
    ],
)  # fmt: skip
def test_a_small_share_is_not_zero(share: float, text: str) -> None:
    assert format_share(share) == text


def test_a_small_hfu_is_shown_everywhere() -> None:
    run = factory_run()
    small = replace(run, utilizations=(replace(run.utilizations[0], value=0.00015),))
    for shown in (run_text(small, width=120), rows_text([run_row(small)], "md"), render_page([small], title="t")):
        assert "0.015 %" in shown.replace("\u00a0", " ")


def test_phases_that_were_never_timed_alone_have_no_such_columns() -> None:
    run = make_run()
    assert run.timing is not None
    assert "alone, host" in run_text(run, width=120)
    on_the_host = replace(run, timing=replace(run.timing, synchronised=()))
    text = run_text(on_the_host, width=120)
    assert "alone" not in text
    assert re.search(r"forward +\S+ \S+ +\d+\.\d %", text)


@pytest.mark.parametrize("width", [80, 90, 120])
def test_a_list_keeps_the_name_of_a_loop_and_what_each_run_was(width: int) -> None:
    fields = {"pass": "forward", "compile": "default", "batch": 2, "model": "medium", "precision": "bf16"}
    runs = [make_run({"attention": "sdpa"}, name="a study"), make_run(fields), recorder_run(name="my own loop")]
    text = rows_text([run_row(run) for run in runs], "table", width=width)
    assert "my own loop" in text
    told = " ".join(text.split())
    assert all(words in told for words in ("a study", "medium", "compiled"))


def test_tokens_are_asked_for_of_a_recorded_loop_alone() -> None:
    asked = "the loop named no tokens_per_step"
    assert asked in " ".join(run_text(replace(recorder_run(), tokens_per_step=None), width=160).split())
    text = run_text(replace(make_run(), tokens_per_step=None), width=160)
    assert asked not in text
    assert "throughput" not in text


def test_what_was_chosen_stands_with_the_run_and_not_among_what_was_not_measured() -> None:
    chosen = "attention auto: flash_triton, the fastest of 4 on NVIDIA H200"
    run = replace(make_run(), notes=(chosen, "memory: this device's allocator keeps no count"))
    assert (choices(run), [text for text in gaps(run) if "auto" in text]) == ([chosen], [])
    text = run_text(run, width=120)
    assert text.index(chosen) < text.index("Not measured") < text.index("keeps no count") < text.index("Environment")
    page = render_page([run], title="A run")
    runs = page[page.index('<section id="time">') :]
    assert runs.index("attention auto: flash_triton") < runs.index('<section id="missing">')
    assert page.count("attention auto: flash_triton") == 1


@pytest.mark.parametrize(
    ("slow_forward", "backward", "share"),
    [
        ((1.0, 1.0, 3.0), (3.0, 1.0, 1.0), "50.0 %"),
        ((3.0, 3.0, 1.0), (1.0, 3.0, 3.0), "150.0 %"),
        ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), None),
    ],
)
def test_phases_whose_medians_do_not_add_up_to_the_steps_say_why(
    slow_forward: tuple[float, ...], backward: tuple[float, ...], share: str | None
) -> None:
    samples = {"forward": slow_forward, "backward": backward}
    samples["step"] = tuple(map(sum, zip(*samples.values(), strict=True)))
    phases = tuple(PhaseSamples(phase=phase, host_s=seconds) for phase, seconds in samples.items())
    timing = Timing(warmup=(), back_to_back=phases)
    text = " ".join(run_text(replace(make_run(), timing=timing), width=100).split())
    assert ("The steps vary so much" in text) == (share is not None)
    assert share is None or f"the phases' medians add up to {share} of the step's median" in text
    # A loop of the user's own may have parts outside of all phases.
    own = " ".join(run_text(recorder_run(timing=timing), width=100).split())
    assert ("The steps vary so much" in own) == (share == "150.0 %")

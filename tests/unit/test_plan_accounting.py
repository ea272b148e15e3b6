import csv
import io
import json
import math
import re
from pathlib import Path

import pytest

from steplab.cli.app import main
from steplab.costs.flops import num_parameters
from steplab.errors import UserError
from steplab.lab.planning import plan_accounting
from steplab.plan.formulas import root, symbol
from steplab.records.accounting import Accounting, Figure
from steplab.report.kit.html import to_html
from steplab.report.kit.rendering import FORMATS, render
from steplab.report.plan.accounting import accounting_document
from steplab.specs.hardware import accelerators, catalogue
from steplab.specs.model import MODEL_SIZES
from steplab.specs.resolve import resolve_step
from steplab.units import figure_in_latex, format_figure

DOCS = Path(__file__).parents[2] / "docs" / "accounting.md"
D, F, L = 16384, 53248, 126
C, W, MX, MY = 4.6e14, 2 * 9e10, 2, 1
C_H100 = 989.4e12


def accounting(model: str = "xxl", *, batch: int = 4, context: int = 128, **options: object) -> Accounting:
    spec = resolve_step({"model": model, "batch": batch, "context": context})
    return plan_accounting(spec, **({"gpu": "TPU v5p"} | options))  # type: ignore[arg-type]


def derived(found: Accounting) -> dict[str, Figure]:
    return {figure.symbol.text: figure for question in found.questions for figure in question.figures}


def figures(found: Accounting) -> dict[str, float]:
    return {name: figure.value for name, figure in derived(found).items()}


# --- against the derivation by hand, and against trial ---------------------------------------------------------------


def test_every_figure_of_the_derivation_by_hand_agrees_to_three_digits() -> None:
    by_hand = dict(re.findall(r"^\| (\S+) \| .+ \| ([\d.e]+) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    own = figures(accounting())
    times_and_results = {"T_math", "T_FSDP", "T_TP", "M"}
    assert set(by_hand) == set(own) - times_and_results
    for name, figure in by_hand.items():
        assert float(f"{own[name]:.3g}") == float(f"{float(figure):.3g}"), name


def times(batch: float, fsdp: float, tp: float) -> tuple[float, float, float]:
    """Seconds of products, gathered weights and activations of an xxl block, by the book's formulas."""
    return (2 * 2 * batch * D * F / (fsdp * tp * C), 2 * 2 * D * F / (tp * W * MX), 2 * 2 * batch * D / (fsdp * W * MY))


def test_the_least_batch_is_the_first_that_hides_communication() -> None:
    own = figures(accounting())
    overlapping = next(b for b in range(1, 10**6) if max(times(b, 16, 4)[1:]) < times(b, 16, 4)[0])
    assert overlapping == math.floor(own["B"]) + 1
    apart = next(b for b in range(1, 10**6) if sum(times(b, 16, 4)[1:]) < times(b, 16, 4)[0])
    assert apart == math.floor(64 * own["b_sum"]) + 1
    for name, seconds in zip(("T_math", "T_FSDP", "T_TP"), times(own["B"], 16, 4), strict=True):
        assert own[name] == pytest.approx(seconds, rel=1e-12)


def test_no_other_split_communicates_less_and_no_larger_mesh_stays_compute_bound() -> None:
    own = figures(accounting())

    def communication(fsdp: float, devices: float) -> float:
        return max(times(own["B"], fsdp, devices / fsdp)[1:])

    tried = [0.01 * step for step in range(100, 6400)]
    assert min(tried, key=lambda fsdp: communication(fsdp, 64)) == pytest.approx(own["X_opt"], abs=0.01)
    assert own["Y_opt"] == pytest.approx(64 / own["X_opt"])
    hidden = [
        devices
        for devices in range(1, 1000)
        if min(communication(0.1 * step, devices) for step in range(10, 1000)) <= 4 * own["B"] * D * F / (devices * C)
    ]
    assert max(hidden) == math.floor(own["N_max"]) == 333
    answer = accounting().questions[4].answer
    whole = min((x for x in (1, 2, 4, 8, 16, 32, 64)), key=lambda fsdp: communication(fsdp, 64))
    assert f"in whole numbers {whole} × {64 // whole}" in answer


def test_the_smallest_number_of_shards_is_the_first_that_fits() -> None:
    weights = 2 * L * D * F
    saved = 2 * L * (D + F) * 512

    def held(shards: int) -> float:
        return (16 * weights + saved / 2) / shards + saved / 2

    least = next(shards for shards in range(1, 1000) if held(shards) < 95e9)
    found = accounting()
    assert f"from N = {least} on" in found.questions[2].answer
    assert figures(found)["M"] == pytest.approx(held(least))
    assert "N = 38 is enough" in found.questions[2].remarks[0]


def test_each_question_is_answered_with_its_figure() -> None:
    expected = (
        "take 3.52 TB, the memory of 44 GPUs of 80 GB (H100 SXM).",
        "take 17.5 MB a token in bf16, so 8.98 GB for a batch of 512 tokens.",
        "M(N) = (S + A / 2) / N + A / 2: less than the 95 GB of TPU v5p from N = 39 on.",
        "from 319 tokens a device on, an overall batch of 20,444 tokens; if FSDP and TP did not overlap, 395 and ",
        "the best split of 64 devices is X = 7.01, Y = 9.13 (in whole numbers 8 × 8), and N may grow to 333 before",
        "The largest gain is from another split (X = 4, Y = 16): it lowers the batch a device from 319 to 79.9 tokens",
    )
    for question, words in zip(accounting().questions, expected, strict=True):
        assert words in question.answer
        assert question.source


def test_every_means_is_what_the_formulas_give() -> None:
    means = {one.what: one.tokens_per_device for one in accounting().questions[-1].means}
    alpha = C / W
    assert means["another split"] == pytest.approx(alpha / (MX * 16))
    assert means["weights of one byte on the wire"] == pytest.approx(alpha / (2 * MX * 4))
    assert alpha * 16 < MY * F < alpha * 32  # one step further is too far


# --- other models, meshes and cards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", list(MODEL_SIZES))
def test_any_model_has_the_state_of_its_parameters(model: str) -> None:
    own = figures(accounting(model))
    assert own["S"] == 16 * num_parameters(MODEL_SIZES[model])


def test_experts_are_gathered_whole_and_multiplied_by_the_rows_that_tokens_take(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 500,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2,
    }))  # fmt: skip
    found = plan_accounting(model=f"hf:{path}", mesh="fsdp=4", gpu="H100 SXM")
    own = figures(found) | {figure.symbol.text: figure.value for figure in found.given}
    of_expert, others = 3 * 64 * 128, 64 * (64 + 32 + 32 + 64) + 64 * 8
    assert (own["E"], own["E_a"], own["k"]) == (8 * of_expert + others, 2 * of_expert + others, 2)
    assert own["P"] - own["P_a"] == 2 * 6 * of_expert
    assert own["S"] == 16 * own["P"]
    assert own["T_math"] == pytest.approx(own["T_FSDP"])  # at the least batch
    (question,) = (each for each in found.questions if "expert parallelism" in each.title)
    assert own["T_EP"] / own["T_rows"] == pytest.approx(3 / 4 * 4 * 64 / own["W"] / (6 * 64 * 128 / own["C"]))
    assert "Balance is an assumption" in question.remarks[0]


def test_a_gpus_communications_share_one_link() -> None:
    found = accounting("8b", gpu="H100 SXM", mesh="fsdp=32,tp=2")
    own, width, keys, inner = figures(found), 4096, 4096, 11008
    elements = 2 * width * (width + keys) + 3 * width * inner

    def hidden(batch: int) -> bool:
        gathered = 2 * elements / (2 * 450e9) + 2 * 4 * batch * width / (32 * 450e9)
        return gathered < 2 * elements * batch / (64 * C_H100)

    low, high = 1, 10**7
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if hidden(middle) else (middle + 1, high)
    assert low == math.floor(own["B"]) + 1
    assert "share one link" in found.questions[3].answer


@pytest.mark.parametrize(
    ("mesh", "options", "said"),
    [
        ("fsdp=32,tp=2", {}, True),
        ("fsdp=4,tp=2", {}, False),
        ("fsdp=32,tp=2", {"axis_bytes_per_s": 50e9}, False),
        ("fsdp=32,tp=2", {"gpu": "TPU v5p"}, False),
    ],
)
def test_an_answer_for_the_link_of_a_node_says_so_where_the_mesh_spans_several(
    mesh: str, options: dict[str, object], said: bool
) -> None:
    found = accounting("8b", **({"gpu": "H100 SXM", "mesh": mesh} | options))  # type: ignore[arg-type]
    assert ("counts the link within a node of 8" in found.questions[3].answer) == said


def test_without_tensor_parallelism_weights_alone_are_communicated() -> None:
    found = accounting("8b", gpu="H100 SXM", mesh="fsdp=16")
    own = figures(found)
    assert own["b"] == pytest.approx(C_H100 / 450e9)
    assert not {"b_sum", "T_TP"} & set(own)
    assert own["T_math"] == pytest.approx(own["T_FSDP"])
    assert "weights alone are communicated" in found.questions[3].answer
    assert "the memory of 1 GPU of 80 GB" in accounting("tiny").questions[0].answer


def test_tensor_parallelism_that_is_too_wide_is_told() -> None:
    found = accounting(mesh="fsdp=2,tp=32")
    assert "No batch is large enough" in found.questions[3].answer
    assert "hidden below Y = 20.8" in found.questions[3].answer
    render(accounting_document(found))


def test_activations_that_fill_a_device_are_told() -> None:
    assert "No number of shards is enough" in accounting(batch=100).questions[2].answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "TPU v9"}, "unknown hardware 'TPU v9'; did you mean TPU v5p. Else choose one of .*TPU v5p"),
        ({"mesh": "dp=2,tp=2"}, "a mesh has fsdp and tp alone, as in fsdp=16,tp=4, not dp=2,tp=2"),
        ({"mesh": "tp=4"}, "gathers no weights; give fsdp at least 2"),
        ({"mesh": "fsdp=x"}, "layout 'fsdp=x' is not known"),
        ({"gpu": "H100 SXM", "axes": "fsdp=2,tp=1"}, "H100 SXM has one link for all axes of a mesh; leave --axes out"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        accounting(**options)  # type: ignore[arg-type]


def test_figures_of_a_card_can_be_replaced() -> None:
    assert figures(accounting(flops_per_s=9.2e14))["b"] == pytest.approx(2 * figures(accounting())["b"])
    assert figures(accounting(axis_bytes_per_s=3.6e11))["b"] == pytest.approx(figures(accounting())["b"] / 2)


def test_a_tpu_is_no_card_that_a_step_is_tried_on() -> None:
    assert {card.name for card in accelerators()} - {card.name for card in catalogue()} == {"TPU v5p"}


def test_a_page_shows_a_derivation_too() -> None:
    page = to_html(accounting_document(accounting()))
    assert "b = α / (M_X Y) = 2,556 / (2 × 4) = 319.4 tokens" in page
    assert "44 GPUs of 80 GB" in page.replace("\N{NO-BREAK SPACE}", " ")


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_the_figures_that_are_put_in_give_the_figure_that_comes_out() -> None:
    for model, card in (("xxl", "TPU v5p"), ("8b", "H100 SXM"), ("small", "TPU v5p")):
        for figure in derived(accounting(model, gpu=card, mesh="fsdp=16,tp=2")).values():
            assert figure.in_figures is not None
            text = figure.in_figures.text.replace(",", "").replace("²", "**2").replace("√", "math.sqrt")
            shown = eval(text.replace("×", "*"), {"math": math})
            assert shown == pytest.approx(figure.value, rel=4e-3), text


def test_formulas_are_written_with_the_brackets_they_need() -> None:
    a, b, c = symbol("a", 2), symbol("b", 3), symbol("M_X", 5)
    assert (a * (b + c)).text() == "a (b + M_X)"
    assert (a / (b * c)).text() == "a / (b M_X)"
    assert ((a / b) * c).text() == "(a / b) M_X"
    assert ((a + b) ** 2).text(figures=True) == "(2 + 3)²"
    assert (1 - a / b).text() == "1 - a / b"
    assert (a - (b + c)).value == -6
    assert (a - (b - c)).text() == "a - (b - M_X)"
    assert root(a * b / c).latex() == r"\sqrt{\frac{a b}{M_{X}}}"
    assert (4 * a * (b + c)).latex(figures=True) == r"4 \cdot 2 \cdot \left(3 + 5\right)"
    assert (format_figure(4.6e14), format_figure(20444.4), format_figure(319.44)) == ("4.6e14", "20,444", "319.4")
    assert figure_in_latex(1.8e11) == r"1.8 \cdot 10^{11}"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_the_command_writes_every_format(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "accounting", "--model", "xxl", "--gpu", "TPU v5p", "--format", format]) == 0
    told = capsys.readouterr().out
    if format == "json":
        rows = json.loads(told)
        assert {row["symbol"]: row["value"] for row in rows if row["row"] == "figure"} == figures(accounting())
        assert sum(row["row"] == "answer" for row in rows) == 6
    elif format == "csv":
        assert len(list(csv.DictReader(io.StringIO(told)))) > 30
    else:
        assert "44 GPUs of 80 GB" in " ".join(told.split())
    if format in ("md", "latex"):
        assert r"$b = \frac{\alpha}{M_{X} Y} = \frac{2{,}556}{2 \cdot 4} = 319.4~\mathrm{tokens}$" in told
        mathematics = re.findall(r"\$(.*?)\$", told)
        assert all(part.count("{") == part.count("}") for part in mathematics)
        assert all(part.isascii() for part in mathematics)


def test_the_command_answers_and_refuses_an_unknown_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "accounting", "--model", "xxl", "--gpu", "TPU v5p"]) == 0
    assert "20,444 tokens" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "accounting", "--precision", "bf16"]) == 2
    assert "--precision" in capsys.readouterr().err
    assert main(["plan", "accounting", "--model", "xxl", "--flops", "459"]) == 2
    assert "type --flops 459e12, not 459" in capsys.readouterr().err
    assert main(["plan", "accounting", "--model", "toy"]) == 2
    assert "an accounting for toy is not supported" in capsys.readouterr().err

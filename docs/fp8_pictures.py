"""Draws fp8_loss.svg, fp8_difference.svg, fp8_error.svg and fp8_flushed.svg, as reports draw, from committed records.

    python docs/fp8_pictures.py

Losses come from `python -m benchmarks.loss_curves`, products from `steplab precision --only audit`.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from steplab import units
from steplab.records.codec import decode
from steplab.records.module_names import without_numbers
from steplab.records.numerics import Audit, Fp8Losses, Numerics
from steplab.report.kit.charts import (
    AXES_HEIGHT,
    GRID,
    INK,
    LEFT,
    MUTED,
    TOP,
    drawing,
    linear_scale,
    put_mark,
    series_color,
    series_legend,
)
from steplab.report.kit.document import Chart
from steplab.report.kit.pictures import Beside

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"
LOSSES = RESULTS / "fp8_loss_curves_h200_202611.json.gz"
AUDIT = RESULTS / "fp8_audit_h100_202611.jsonl.gz"
REFERENCE = "plain, fp32"
SHOWN = {"fp8": "fp8", "bf16 weights with masters": "bf16_master", "bf16_pure": "bf16_pure (control)"}
LAYERS = {
    "blocks.*.attention": "q, k, v",
    "blocks.*.attention.output": "attention output",
    "blocks.*.feed_forward": "feed-forward",
}
WINDOW = 20
"""Steps in a mean of the curves."""
WIDTH, BOTTOM = 340, 44


def main(folder: Path = HERE) -> None:
    for chart, names in ((losses(), ("loss", "difference")), (products(), ("error", "flushed"))):
        beside = Beside(folder="")
        list(beside.pictures(chart))
        for content, name in zip(beside.files.values(), names, strict=True):
            (folder / f"fp8_{name}.svg").write_bytes(content)


def smoothed(losses: Sequence[float]) -> list[float]:
    return [fmean(losses[at : at + WINDOW]) for at in range(0, len(losses) - WINDOW + 1, WINDOW)]


def losses() -> Chart:
    """Mean losses of the seeds, and differences from fp32 with the same seed, and the spread of fp32's seeds."""
    curves: dict[str, dict[str, list[float]]] = json.loads(gzip.decompress(LOSSES.read_bytes()))["curves"]
    means = {name: {seed: smoothed(each) for seed, each in curves[name].items()} for name in (REFERENCE, *SHOWN)}
    reference = means.pop(REFERENCE)
    steps = [WINDOW * (number + 0.5) for number in range(len(next(iter(reference.values()))))]
    pictures = []
    with drawing(
        WIDTH, AXES_HEIGHT + BOTTOM, "Loss over 400 steps of small in fp32, fp8, bf16_master and bf16_pure"
    ) as on:
        axes = on.axes(LEFT, BOTTOM, 12, TOP)
        for index, each in enumerate((reference, *means.values())):
            axes.plot(steps, [fmean(of) for of in zip(*each.values(), strict=True)], color=series_color(index))
        axes.set(ylim=(2.4, 5), ylabel="loss, nats per token", xlabel="step")
        axes.grid(axis="y")
        pictures.append(on.picture("Loss"))
    with drawing(WIDTH, AXES_HEIGHT + BOTTOM, "Difference from fp32 with the same seed, each seed a line") as on:
        axes = on.axes(LEFT, BOTTOM, 12, TOP)
        spread = [stdev(of) for of in zip(*reference.values(), strict=True)]
        axes.fill_between(steps, [-each for each in spread], spread, color=GRID, linewidth=0)
        for index, each in enumerate(means.values(), start=1):
            for seed, curve in each.items():
                ours = [a - b for a, b in zip(curve, reference[seed], strict=True)]
                axes.plot(steps, ours, color=series_color(index), linewidth=1)
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set(ylim=(-0.15, 0.25), ylabel="loss − loss in fp32", xlabel="step")
        pictures.append(on.picture("Difference from fp32"))
    return Chart(pictures=tuple(pictures), legend=series_legend(("fp32", *SHOWN.values()), "━" * 4))


def products() -> Chart:
    """Error of each kind of product, and the largest share of an operand that becomes zero."""
    found = of_layers(audited())
    pictures = []
    for name, title in (("error", "Error of a product"), ("flushed", "Share of an operand that becomes zero")):
        with drawing(WIDTH, AXES_HEIGHT + BOTTOM, f"{title}, by layer and pass; a mark per block") as on:
            axes = on.axes(LEFT, BOTTOM, 12, TOP)
            values = [
                getattr(each, name) for of_passes in found.values() for some in of_passes.values() for each in some
            ]
            linear_scale(max(values), units.format_share).put_on(axes)
            for place, of_passes in enumerate(found.values()):
                for index, some in enumerate(of_passes.values()):
                    for each in some:
                        put_mark(axes, place + 0.3 * index - 0.15, getattr(each, name), index, size=5, alpha=0.6)
            axes.set_xticks(range(len(found)), list(found), color=INK)
            axes.set_ylabel(title.lower())
            axes.grid(axis="y")
            pictures.append(on.picture(title))
    return Chart(pictures=tuple(pictures), legend=series_legend(("forward", "backward")))


def audited() -> Audit:
    record = decode(gzip.decompress(AUDIT.read_bytes()).decode().strip())
    assert isinstance(record, Numerics)
    assert record.audit is not None
    return record.audit


def of_layers(audit: Audit) -> Mapping[str, Mapping[str, list[Fp8Losses]]]:
    """Layer, pass -> losses of its products, a block each."""
    found: dict[str, Any] = {}
    for use in audit.matmuls:
        if use.fp8:
            layer = LAYERS[without_numbers(use.module)]
            found.setdefault(layer, {"forward": [], "backward": []})[use.phase].append(use.fp8)
    return found


if __name__ == "__main__":
    main()

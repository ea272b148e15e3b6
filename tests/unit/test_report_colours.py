"""Contrast of a page's text in both colour schemes (WCAG 2.2, 1.4.3: 4.5 to 1)."""

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import steplab
from steplab.records.profile import CATEGORIES
from steplab.report.kit.charts import CATEGORY_COLORS, SERIES, category_legend, css_color

CSS = (Path(steplab.__file__).parent / "report" / "kit" / "page.css").read_text(encoding="utf-8")


def scheme(name: str) -> dict[str, str]:
    light, dark = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)[:2]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light if name == "light" else dark))


def luminance(color: str) -> float:
    channels = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("background", ["paper", "wash"])
@pytest.mark.parametrize("text", ["ink", "muted", "bad", "c1"])
def test_text_has_enough_contrast(name: str, background: str, text: str) -> None:
    colors = scheme(name)
    assert contrast(colors[text], colors[background]) >= 4.5


@pytest.mark.parametrize("name", ["light", "dark"])
def test_marks_stand_out_from_the_page(name: str) -> None:
    colors = scheme(name)
    series = [color for variable, color in colors.items() if re.fullmatch(r"c[1-8]", variable)]
    assert len(series) == 8
    assert all(contrast(color, colors["paper"]) >= 3 for color in series)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def palettes() -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    def linear(text: str) -> NDArray[np.float64]:
        value = np.array([int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)

    papers = re.findall(r"--paper: (#\w{6})", CSS)
    colors = {index: re.findall(rf"--c{index}: (#\w{{6}})", CSS) for index in range(9, 21)}
    assert len(papers) == 2
    assert len(CATEGORY_COLORS) == len(CATEGORIES) == len(colors)
    return [(linear(papers[i]), np.array([linear(found[i]) for found in colors.values()])) for i in range(2)]


# Machado, Oliveira and Fernandes 2009, severity 1: what a protanope and a deuteranope see.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
}


def oklab(color: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ottosson 2020."""
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
              [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
              [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    lms = np.cbrt(np.clip(color, 0, None) @ np.array(to_lms).T)
    return np.asarray(lms @ np.array(to_lab).T)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_categories_can_be_told_apart_by_everyone_and_from_the_page(vision: str, scheme: int) -> None:
    paper, colors = palettes()[scheme]
    seen = oklab(np.clip(colors @ VISIONS[vision].T, 0, 1))
    distances = np.linalg.norm(seen[:, None] - seen[None], axis=-1)[np.triu_indices(len(seen), 1)]
    assert distances.min() > 0.075  # 0.02 is just distinguishable side by side
    luminance = colors @ np.array([0.2126, 0.7152, 0.0722])
    background = paper @ np.array([0.2126, 0.7152, 0.0722])
    contrast = (np.maximum(luminance, background) + 0.05) / (np.minimum(luminance, background) + 0.05)
    assert contrast.min() >= 3  # WCAG 2.1, 1.4.11


def test_a_category_has_one_colour_everywhere() -> None:
    colors = [css_color(color) for color in CATEGORY_COLORS]
    assert colors == [f"var(--c{number})" for number, _, _ in category_legend(CATEGORIES)]
    assert not {css_color(color) for color in SERIES} & set(colors)
    assert all(CSS.count(f"--c{number}:") == 2 for number in range(1, 21))

"""Text on a page has enough contrast in both colour schemes (WCAG 2.2, 1.4.3: 4.5 to 1)."""

import re
from pathlib import Path

import pytest

import steplab

CSS = (Path(steplab.__file__).parent / "report" / "kit" / "page.css").read_text(encoding="utf-8")


def scheme(name: str) -> dict[str, str]:
    """The colours of a scheme by their variables."""
    light, dark = re.findall(r":root \{(.*?)\}", CSS, flags=re.DOTALL)[:2]
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", light if name == "light" else dark))


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2.2)."""
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

"""Shares of a peak or of a step in words."""

from steplab import units

_LEAST = 0.001  # from here on one decimal of a percentage says enough
_SMALLEST = 1e-6  # below, digits would only be zeros


def format_share(share: float) -> str:
    """A percentage whose digits never round away: 0.4312 -> '43.1 %', 0.000154 -> '0.015 %', 0.0 -> '0.0 %'.

    What is smaller than a ten-thousandth of a per cent is told as that.
    """
    if 0 < share < _SMALLEST:
        return f"<{100 * _SMALLEST:.4f} %"
    return units.format_percent(share) if share == 0 or abs(share) >= _LEAST else f"{100 * share:.2g} %"

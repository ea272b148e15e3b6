"""Shares of a peak or of a step in words."""

from steplab import units

_LEAST = 0.001  # from here on one decimal of a percentage says enough


def format_share(share: float) -> str:
    """A percentage whose digits never round away: 0.4312 -> '43.1 %', 0.000154 -> '0.015 %', 0.0 -> '0.0 %'."""
    return units.format_percent(share) if share == 0 or abs(share) >= _LEAST else f"{100 * share:.2g} %"

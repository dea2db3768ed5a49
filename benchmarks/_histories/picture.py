"""The trade-off as a picture: latency to the right, false alarms upwards, one curve a rule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

Point: TypeAlias = tuple[float, float, float]
"""Limit in seconds, false alarms per instance-day, median latency in seconds."""

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 84, 190, 64, 64
MAX_X = 630.0
FLOOR: Final = 0.01
"""The least rate that the logarithmic part of the axis shows; 0 stands below it."""

CEILING: Final = 300.0

STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "silence only": ("#c0392b", "6 4"),
    "log": ("#d68910", ""),
    "log, /proc, GPU": ("#2471a3", ""),
    "all": ("#1e8449", ""),
}
"""Colour and dashes of each curve."""

_TICKS_X: Final = (0, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600)
_TICKS_Y: Final = (0.0, 0.01, 0.1, 1.0, 10.0, 100.0)


def svg(curves: Mapping[str, Sequence[Point]], *, days: float) -> str:
    """Return the picture of *curves*, measured over *days* instance-days."""
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
            ' font-family="system-ui, sans-serif" font-size="13" fill="#222">'
        ),
        "<title>False alarms against latency, by what can be asked</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        (
            f'<text x="{LEFT}" y="28" font-size="16" font-weight="600">'
            "What patience costs, and what it spares</text>"
        ),
        (
            f'<text x="{LEFT}" y="47" fill="#555">each point is one stall_after, in seconds; '
            f"{days:.0f} instance-days without a hang for the rates</text>"
        ),
        *_axes(),
    ]
    told: list[tuple[float, float]] = []
    for name, points in curves.items():
        lines += _curve(name, points, told)
    lines += _legend(curves)
    return "\n".join((*lines, "</svg>", ""))


def _x(seconds: float) -> float:
    return LEFT + min(seconds, MAX_X) / MAX_X * (WIDTH - LEFT - RIGHT)


def _y(rate: float) -> float:
    height = HEIGHT - TOP - BOTTOM
    if rate <= 0:
        return TOP + height
    step = height * 0.12  # what lies between 0 and the logarithmic part
    share = math.log(max(rate, FLOOR) / FLOOR) / math.log(CEILING / FLOOR)
    return TOP + (height - step) * (1 - min(share, 1.0))


def _axes() -> Iterator[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for rate in _TICKS_Y:
        y = _y(rate)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e3e3e3"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{rate:g}</text>'
    for seconds in _TICKS_X:
        x = _x(seconds)
        yield f'<path d="M{x:.1f} {bottom}v5" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{seconds}</text>'
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888"/>'
    middle = (LEFT + right) / 2
    yield (
        f'<text x="{middle:.0f}" y="{bottom + 44}" text-anchor="middle">'
        "seconds from the stop to the alarm, median over all kinds of hang</text>"
    )
    across = (TOP + bottom) / 2
    yield (
        f'<text x="22" y="{across:.0f}" text-anchor="middle"'
        f' transform="rotate(-90 22 {across:.0f})">false alarms per instance-day</text>'
    )


def _curve(name: str, points: Sequence[Point], told: list[tuple[float, float]]) -> Iterator[str]:
    """Yield one curve; *told* are the places that have a label already."""
    color, dashes = STYLES[name]
    places = [(limit, _x(late), _y(rate)) for limit, rate, late in points]
    way = "L".join(f"{x:.1f} {y:.1f}" for _, x, y in places)
    yield (
        f'<path d="M{way}" fill="none" stroke="{color}" stroke-width="2"'
        f' stroke-dasharray="{dashes}"/>'
    )
    for limit, x, y in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
        if all(abs(x - a) + abs(y - b) > 30 for a, b in told):
            told.append((x, y))
            yield (
                f'<text x="{x + 7:.1f}" y="{y - 7:.1f}" font-size="11" fill="{color}">'
                f"{limit:g}</text>"
            )


def _legend(curves: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    x = WIDTH - RIGHT + 24
    for number, name in enumerate(curves):
        y = TOP + 14 + 24 * number
        color, dashes = STYLES[name]
        yield (
            f'<path d="M{x} {y}h26" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        )
        yield f'<text x="{x + 34}" y="{y + 4}">{name}</text>'

"""Draws ``docs/explanation/black-box.svg``: a store stops, the engines that wait for it follow.

``python tools/blackbox_picture.py`` records eight laboratory servers and their store, stops the
store, and draws what the bundle has of it; ``python tools/blackbox_picture.py BUNDLE`` draws that
of a bundle which is there already.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "explanation" / "black-box.svg"

WIDTH, LEFT, RIGHT = 960, 170, 24
ROW, TOP = 30, 74
BEFORE, AFTER = 6.0, 6.0
"""Seconds around the first stop."""

STYLE = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
.row { text-anchor: end; }
.small { font-size: 12px; fill: #57606a; }
.grid { stroke: #d8dee4; stroke-dasharray: 2 4; }
.store { fill: #bc4c00; } .engine { fill: #54aeff; }
.between { fill: #cf222e; fill-opacity: 0.25; stroke: #cf222e; }
.first { stroke: #bc4c00; stroke-width: 2; }
"""


def record() -> bytes:
    """Return a fresh bundle."""
    sys.path.insert(0, str(ROOT / "tests" / "integration"))
    from stores import StoreFleet, wait_recorded, watch

    with tempfile.TemporaryDirectory() as folder:
        ray = Path(folder, "ray")
        ray.mkdir()
        with StoreFleet(ray, servers=8) as fleet:
            fleet.wait_ready()
            with watch(fleet, Path(folder)) as hangwatch:
                wait_recorded(fleet, Path(folder), 20.0)
                fleet.stop_store()
                bundle = hangwatch.wait("bundle", seconds=120)["bundle"]
                hangwatch.end()
                return Path(bundle).read_bytes()


@dataclass
class Row:
    """One thread: its stop, and when it was put on a CPU how often."""

    stop: dict[str, Any]
    looks: list[tuple[float, int]]


def rows(bundle: bytes) -> list[Row]:
    """Return the processes that changed, the first one first."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(bundle)) as archive:
        for member in archive.getmembers():
            if (name := member.name.partition("/")[2]).startswith("blackbox/"):
                found = archive.extractfile(member)
                assert found is not None
                files[name] = found.read().decode()
    looks: dict[int, list[tuple[float, int]]] = {}
    for strip in csv.DictReader(io.StringIO(files["blackbox/counters.csv"])):
        at = datetime.fromisoformat(strip["time"]).timestamp()
        for i, count in enumerate(strip["slices"].split()):
            if count != "-":
                place = at + i * float(strip["period_s"])
                looks.setdefault(int(strip["tid"]), []).append((place, int(count)))
    return [
        Row(stop, looks[stop["tid"]])
        for stop in json.loads(files["blackbox/stops.json"])
        if stop["change"] == "quiet"
    ]


def window(stop: dict[str, Any]) -> tuple[float, float]:
    earliest, latest = (datetime.fromisoformat(stop[key]) for key in ("earliest", "latest"))
    return earliest.timestamp(), latest.timestamp()


def svg(found: list[Row]) -> str:
    """Return the picture."""
    zero = sum(window(found[0].stop)) / 2
    height = TOP + ROW * len(found) + 50
    scale = (WIDTH - LEFT - RIGHT) / (BEFORE + AFTER)

    def x(at: float) -> float:
        return round(LEFT + (min(max(at - zero, -BEFORE), AFTER) + BEFORE) * scale, 1)

    title = "How often each process ran in each quarter of a second, around the stop of a store"
    bottom = TOP + ROW * len(found) + 6
    told = "Framed: between which instants each of them stopped, as hangwatch tells it."
    box = f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="black-box-title"'
    parts = [
        f'<svg {box} xmlns="http://www.w3.org/2000/svg">',
        f'<title id="black-box-title">{title}</title>\n<style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        f'<text x="20" y="28">{title}</text>',
        f'<text class="small" x="20" y="48">{told}</text>',
    ]
    for second in range(-int(BEFORE), int(AFTER) + 1):
        place = x(zero + second)
        kind = "first" if second == 0 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{place}" y1="{TOP - 8}" x2="{place}" y2="{bottom}"/>'
        )
        told = f"{second:+d} s" if second else "stop"
        parts.append(
            f'<text class="small" x="{place}" y="{bottom + 18}" text-anchor="middle">{told}</text>'
        )
    for number, row in enumerate(found):
        base = TOP + ROW * (number + 1) - 6
        role = row.stop["role"]
        parts.append(
            f'<text class="row" x="{LEFT - 12}" y="{base - 4}">{role} {row.stop["pid"]}</text>'
        )
        most = max(count for _, count in row.looks) or 1
        for at, count in row.looks:
            if count and 0.25 - BEFORE <= at - zero <= AFTER:
                tall = round(4 + (ROW - 14) * min(1.0, 2 * count / most), 1)
                wide = round(0.25 * scale - 2, 1)
                kind = "store" if role == "store" else "engine"
                parts.append(
                    f'<rect class="{kind}" x="{round(x(at) - wide - 1, 1)}" '
                    f'y="{round(base - tall, 1)}" width="{wide}" height="{tall}"/>'
                )
        begin, end = window(row.stop)
        parts.append(
            f'<rect class="between" x="{x(begin)}" y="{base - ROW + 8}" '
            f'width="{round(x(end) - x(begin), 1)}" height="{ROW - 8}"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    bundle = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else record()
    PICTURE.write_text(svg(rows(bundle)), encoding="utf-8")


if __name__ == "__main__":
    main()

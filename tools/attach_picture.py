"""Records ``docs/how-to/attach.svg``: the live page of ``attach`` on servers that hang."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hangwatch.lab.launch import Fleet

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 116, 22

# Without the fonts that rich would have the reader fetch from elsewhere.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def record(folder: Path) -> str:
    """Return the last picture before the end, as the terminal got it."""
    sys.path.insert(0, str(ROOT / "tests" / "integration"))
    from terminal import Terminal

    (folder / "ray").mkdir()
    fault = ("--fault", "blocked-call", "--faulty", "3")
    with Fleet(folder / "ray", *fault, servers=8) as fleet:
        fleet.wait_ready()
        arguments = (
            *("attach", "--pid", str(fleet.servers[0]["pid"]), "--heartbeat-interval", "1"),
            *(
                "--stall-after",
                "6",
                "--output",
                str(folder / "out"),
                "--state",
                str(folder / "state"),
            ),
        )
        with Terminal(*arguments, width=WIDTH, height=HEIGHT) as terminal:
            terminal.wait("8 ok")
            until = time.monotonic() + 16  # for a history of tokens
            while time.monotonic() < until:
                terminal.read(0.2)
            fleet.start_fault()
            terminal.wait("second sample", "3 hung")
            picture = terminal.written.rpartition("\x1b[H")[2]
            terminal.wait("bundle: ")
            terminal.press(b"\x03")
            terminal.finish()
    return picture.partition("\x1b[J")[0].replace("\x1b[K", "").replace("\r", "")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        picture = record(Path(folder))
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(picture), soft_wrap=True)
    svg = console.export_svg(title="hangwatch attach", code_format=FORMAT, unique_id="page")
    (ROOT / "docs" / "how-to" / "attach.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()

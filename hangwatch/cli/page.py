"""The live page of ``attach``: a look at the board, and what happened, as lines of a terminal.

Functions of values, so that a page can be compared with a golden text. Whoever shows it is
``cli.screen``.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from hangwatch.cli.news import Heard
from hangwatch.core.board import Board, Row, fit, seconds, sentences, summary
from hangwatch.core.plain import printable
from hangwatch.core.vitals import RECENT
from hangwatch.model.verdict import ALARMS

STYLES: Final[Mapping[str, str]] = {
    "ok": "green",
    "loading": "blue",
    "idle": "cyan",
    "paused": "blue",
    "slow": "yellow",
    "log_stalled": "yellow",
    "blind": "yellow",
    "suspected_hang": "bold yellow",
    "blocked": "bold magenta",
    "hung": "bold red",
    "dead": "bold red",
    "gone": "dim",
}

ENOUGH: Final = 12
"""Rows for whose sake news and remarks give way."""

_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = str.maketrans({**dict(zip(_BARS, "_.:-=+*#", strict=True)), "…": "~", "·": "-"})
_QUOTES: Final = str.maketrans("“”", '""')


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """What a page is drawn on.

    Attributes:
        width: Columns.
        height: Lines.
        styled: Whether escape sequences may be used.
        plain: Whether somebody asked for no colour; bold and dim remain.
        ascii: Whether other characters cannot be shown.
    """

    width: int
    height: int
    styled: bool = False
    plain: bool = False
    ascii: bool = False


def draw(seen: Board, heard: Heard, sheet: Sheet, *, footer: str = "") -> list[str]:
    """Return the page, at most as many lines as the sheet has."""
    for brief, count in ((False, 6), (False, 3), (False, 1), (True, 1), (True, 0)):
        head = list(_head(seen, heard, sheet, brief=brief))
        tail = list(_tail(heard.news[-count:] if count else (), footer, sheet))
        # A blank line before the table, and its own head.
        room = sheet.height - len(head) - len(tail) - 2
        if room >= min(len(seen.rows), ENOUGH):
            break
    else:
        head, tail, room = head[:2], [], sheet.height - 4
    body: list[RenderableType] = []
    if seen.rows and room > 0:
        rows, rest = fit(seen.rows, room)
        body = ["", _table(rows, seen.at, sheet), *([Text(rest, style="dim")] if rest else [])]
    return _rendered(chain(head, body, tail), sheet)[: sheet.height]


def _rendered(parts: Iterable[RenderableType], sheet: Sheet) -> list[str]:
    console = Console(
        file=io.StringIO(),
        width=sheet.width,
        force_terminal=sheet.styled,
        color_system="standard" if sheet.styled else None,
        no_color=sheet.plain,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part, overflow="ellipsis", no_wrap=True)
    text = captured.get()
    if sheet.ascii:
        text = text.translate(_ASCII).translate(_QUOTES).encode("ascii", "replace").decode()
    return [line.rstrip(" ") for line in text.splitlines()]


def _head(seen: Board, heard: Heard, sheet: Sheet, *, brief: bool) -> Iterable[Text]:
    clock = f"{seen.at:%H:%M:%S}"
    title = Text.assemble(("hangwatch", "bold"), f"  {summary(seen)}")
    if sheet.width >= 40:
        title.truncate(sheet.width - len(clock) - 2, overflow="ellipsis", pad=True)
        title.append(f"  {clock}", style="dim")
    yield title
    for stop in seen.stops[-2:]:
        first, *more = sentences(stop)
        yield from _wrapped(first, sheet, style="" if stop.notice else "bold red")
        for line in () if brief else more:
            yield from _wrapped(line, sheet)
        if stop.bundle:
            # Whole, for it will be copied.
            path, width = printable(f"bundle: {stop.bundle}"), sheet.width
            yield from (Text(path[i : i + width], "bold") for i in range(0, len(path), width))
    for progress in heard.captures.values():
        yield Text(progress, style="cyan")
    for remark in () if brief else seen.remarks:
        yield from _wrapped(remark, sheet, style="dim")


def _tail(news: Sequence[str], footer: str, sheet: Sheet) -> Iterable[Text]:
    if news or footer:
        yield Text()
    for line in news:
        if sheet.width >= _WIDE:  # the table says why, so one line is enough
            yield Text(printable(line))
        else:
            yield from _wrapped(line, sheet, indent=" " * 10)
    if footer:
        yield Text(footer, style="dim")


def _wrapped(text: str, sheet: Sheet, *, indent: str = "", style: str = "") -> Iterable[Text]:
    lines = textwrap.wrap(
        printable(text),
        max(sheet.width, 20),
        max_lines=2,
        placeholder=" …",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return (Text(line, style=style) for line in lines)


def _table(rows: Sequence[Row], at: datetime, sheet: Sheet) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
        expand=sheet.width >= _WIDE,
    )
    columns = tuple(_columns(rows, at, sheet))
    for head, options, _ in columns:
        table.add_column(head, no_wrap=True, **options)
    for row in rows:
        table.add_row(*(cell(row) for _, _, cell in columns))
    return table


_MIDDLE: Final = 60
"""Columns of the terminal from which on there is room for tokens;"""
_FULL: Final = 80
"""for confidence and since;"""
_WIDE: Final = 100
"""for why;"""
_BROAD: Final = 120
"""for a longer history of tokens."""

_Column = tuple[str, dict[str, Any], Callable[[Row], Text]]


def _columns(rows: Sequence[Row], at: datetime, sheet: Sheet) -> Iterable[_Column]:
    width = sheet.width
    yield "instance", {"max_width": 24 if width >= _FULL else 12}, _name
    if width >= _WIDE and len({row.engine for row in rows if row.engine}) > 1:
        yield "engine", {}, lambda row: Text(row.engine)
    yield "beat", {"justify": "right", "min_width": 6}, _beat
    if width >= _MIDDLE:
        history = RECENT if width >= _BROAD else RECENT // 2
        yield "tokens/s", {}, lambda row: _tokens(row, history)
        yield "run/wait", {"justify": "right"}, _in_flight
    yield "verdict", {"min_width": 8}, lambda row: _verdict(row, sure=width >= _FULL)
    if width >= _FULL:
        yield "since", {}, lambda row: Text(_since(row, at))
    if width >= _WIDE:
        yield "why", {"ratio": 1}, lambda row: Text(printable("; ".join(row.verdict.because[:1])))


def _name(row: Row) -> Text:
    return Text(printable(row.instance), style="bold" if isinstance(row.verdict, ALARMS) else "")


def _beat(row: Row) -> Text:
    text = "-" if row.silence is None else seconds(row.silence)
    return Text(text, style="bold" if row.missed else "")


def _tokens(row: Row, history: int) -> Text:
    gap = min(row.missed, history // 2)
    number = f"{row.tps[-1]:,.0f}" if row.tps and not row.missed else "-"
    line = sparkline(row.tps[-(history - gap) :]) + " " * gap
    return Text.assemble((line.rjust(history), "cyan"), f" {number:>7}")


def sparkline(values: Sequence[float]) -> str:
    """Return *values* as bars of eight heights; the greatest has the highest."""
    top = max((*values, 1.0))
    steps = len(_BARS) - 1
    return "".join(_BARS[round(value / top * steps)] for value in values)


def _in_flight(row: Row) -> Text:
    if row.running is None and row.waiting is None:
        return Text("-")
    return Text("/".join("-" if n is None else str(n) for n in (row.running, row.waiting)))


def _verdict(row: Row, *, sure: bool) -> Text:
    word = row.verdict.word
    confidence = f" ({row.verdict.confidence.value})" if sure else ""
    return Text.assemble((word, STYLES.get(word, "")), (confidence, "dim"))


def _since(row: Row, at: datetime) -> str:
    today = at - row.since < timedelta(hours=20)
    return f"{row.since:%H:%M:%S}" if today else f"{row.since:%m-%d %H:%M}"

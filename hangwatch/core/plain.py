"""Evidence as text that is only text: nothing in it commands a terminal or a web page.

A log line, a thread's name or a health message may hold anything. Before it is shown, control
characters and characters that turn the direction of writing are replaced; in Markdown, everything
that could become a mention, a reference, a link, a picture, markup or the end of a code block is
disarmed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

# Between a character and what would give it a meaning; it is not shown.
WORD_JOINER: Final = "\u2060"

# An underscore within a word means nothing (CommonMark 6.2, rule 2), and reads better bare.
_MARKDOWN: Final = re.compile(r"([\\`*\[\]|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_BEGINNING: Final = re.compile(r"^([-+=#:]|\d{1,9}(?=[.)]))")
_REFERENCE: Final = re.compile(r"(@|#|GH-)(?=[A-Za-z0-9\\])")
_LINK: Final = re.compile(r"(?i)(\w)(://)|\b(www)(\.)|(mailto|xmpp|tel)(:)")


def printable(text: str) -> str:
    """Return *text* on one line without control, format, surrogate and private characters."""
    return "".join(_printable(char) for char in text).strip()


def _printable(char: str) -> str:
    if char in "\t\n\r\v\f":
        return " "
    if char == " " or "!" <= char <= "~":
        return char
    category = unicodedata.category(char)
    if category in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return REPLACEMENT
    return " " if category == "Zs" else char


def markdown(text: str) -> str:
    """Return *text* as inline Markdown that shows it and does nothing else."""
    text = printable(text)
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LINK.sub(_break_link, text)
    text = _REFERENCE.sub(rf"\1{WORD_JOINER}", text)
    text = _MARKDOWN.sub(r"\\\1", text)
    # A number in front of a dot cannot be escaped by itself; what follows it can.
    return _BEGINNING.sub(_disarm_beginning, text)


def _disarm_beginning(match: re.Match[str]) -> str:
    return f"{match[1]}{WORD_JOINER}" if match[1].isdigit() else f"\\{match[1]}"


def _break_link(match: re.Match[str]) -> str:
    parts = [part for part in match.groups() if part is not None]
    return WORD_JOINER.join(parts)


def code(text: str) -> str:
    """Return *text* as inline Markdown code."""
    text = printable(text) or " "
    ticks = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}"


def fenced(lines: Iterable[str], language: str = "text") -> str:
    """Return *lines* as a Markdown code block that they cannot end."""
    body = [printable_line(line) for line in lines]
    longest = max((len(run) for line in body for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}{language}", *body, fence))


def printable_line(line: str) -> str:
    """Return one line as ``printable`` does, its leading blanks kept."""
    kept = len(line) - len(line.lstrip(" "))
    return " " * kept + printable(line)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as aligned columns, numbers to the right; the first row is the head."""
    if not rows:
        return []
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [
        all(re.fullmatch(r"[\d.?]+", row[i]) for row in cells[1:]) for i in range(len(cells[0]))
    ]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]

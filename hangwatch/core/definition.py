"""A profile from a table of the configuration file: an engine that has no file of ours.

Theory of operation. A stranger's regular expression runs on every line that holds its literal, in
the process that must not hang. So it must need a literal (blocks are searched for that first), must
not match an empty line, and must not hold what can take exponential time: a repeat or a
choice within an unbounded repeat, or several unbounded ones of anything in a row. What is refused
says what to write instead. That is help, no proof: who parses a line bounds the time that it takes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hangwatch.core.serving import BORING_THREADS, CLIENT_TROUBLE
from hangwatch.model.identity import Role
from hangwatch.model.profile import (
    EngineProfile,
    MetricNames,
    RolePattern,
    Signal,
    SignalPattern,
)

MIN_NEEDLE: Final = 4
"""Bytes of a literal; shorter ones are in every other line."""

MAX_PATTERN: Final = 2000
MAX_RUNS: Final = 3
"""Unbounded repeats of nearly anything (``.*``) in one expression; more take too long to fail."""

GROUPS: Final = (
    "stamp", "tag", "in_tps", "out_tps", "running", "waiting", "routed", "api_waiting", "finished",
    "failed", "kv_cache_pct", "prefix_hit_pct", "draft_acceptance_pct",
)  # fmt: skip
"""What the heartbeat's expression may name: the fields of ``Heartbeat``, its stamp and its tag."""

SIGNALS: Final[Mapping[str, Signal]] = {
    "starting": Signal.STARTING,
    "ready": Signal.READY,
    "sleep": Signal.SLEEP,
    "wake": Signal.WAKE,
    "updated": Signal.UPDATED,
    "aborted": Signal.ABORTED,
    "completed": Signal.COMPLETED,
    "beat_lost": Signal.BEAT_LOST,
    "dead": Signal.ENGINE_DEAD,
    "stopped": Signal.STOPPED,
}

PURPOSES: Final = ("health", "metrics", "sleeping")

KEYS: Final = (
    "title", "heartbeat", "needle", "interval", "step_driven", "says_idle",
    "context", "endpoints", "metrics", "roles", *SIGNALS,
)  # fmt: skip

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_PATH: Final = re.compile(r"/[A-Za-z0-9_./-]{0,200}")

# GET is no promise: LMDeploy's /terminate and SGLang's /flush_cache take it, too.
_HARMFUL: Final = re.compile(
    r"(?:^|[/_.-])(?:terminate|shutdown|stop|kill|exit|quit|restart|reset|reload|flush|clear|delete"
    r"|abort|cancel|pause|resume|continue|sleep|wake|wakeup|release|load|unload|update|set|start|end"
    r"|init|destroy|profile|generate|completions?|chat|embeddings?|invocations|slow_down)(?=$|[/_.-])"
)


class DefinitionError(ValueError):
    """A table that is no profile.

    Attributes:
        keys: Where in the table, from the outermost key on.
    """

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


def define(name: str, table: Any, *, taken: Iterable[str] = ()) -> EngineProfile:
    """Return the profile that a table of the configuration describes.

    Args:
        name: Its name.
        table: What ``[profiles.NAME]`` holds.
        taken: Names that are in use.

    Raises:
        DefinitionError: It describes none; says where, and what to write instead.
    """
    if not _NAME.fullmatch(name) or name in {*taken, "auto"}:
        why = "is taken" if name in {*taken, "auto"} else "is no name"
        raise DefinitionError((), f"{name!r} {why}: choose another one, of a-z, 0-9, _ and -")
    given = _table((), table)
    _known((), given, KEYS)
    if "heartbeat" not in given:
        raise DefinitionError((), "heartbeat is missing: give the regular expression of its line")
    beat = _pattern(("heartbeat",), given["heartbeat"])
    unknown = [group for group in beat.compiled.groupindex if group not in GROUPS]
    if unknown:
        raise DefinitionError(
            ("heartbeat",),
            f"unknown group {unknown[0]!r}; {_nearest(unknown[0], GROUPS, 'groups')}",
        )
    return EngineProfile(
        name=name,
        title=_text(("title",), given.get("title", name)),
        alive=beat.compiled,
        needles=(_needle(given, beat),),
        families=(beat.compiled,),
        interval=_seconds(("interval",), given.get("interval", 10.0)),
        says_idle=_flag(given, "says_idle"),
        step_driven=_flag(given, "step_driven"),
        signals=tuple(_signals(given)),
        endpoints=_endpoints(given.get("endpoints", {})),
        metrics=_metrics(given.get("metrics", {})),
        roles=tuple(_roles(given.get("roles", {}))),
        context=_context(given.get("context")),
        producer=CLIENT_TROUBLE,
        boring_threads=BORING_THREADS,
        source="the configuration",
    )


# ---------------------------------------------------------------------- the parts of a table


def _needle(given: Mapping[str, Any], beat: _Pattern) -> bytes:
    if "needle" not in given:
        return beat.needle
    needle = _text(("needle",), given["needle"]).encode()
    if len(needle) < MIN_NEEDLE or any(byte in needle for byte in b"\r\n\x00"):
        raise DefinitionError(
            ("needle",), f"takes {MIN_NEEDLE} characters or more of one line, not {needle!r}"
        )
    return needle


def _signals(given: Mapping[str, Any]) -> Iterator[SignalPattern]:
    for key, signal in SIGNALS.items():
        texts = given.get(key, ())
        for text in (texts,) if isinstance(texts, str) else _list((key,), texts):
            pattern = _pattern((key,), text)
            yield SignalPattern(
                signal=signal,
                pattern=pattern.compiled,
                needle=pattern.needle,
                source="the configuration",
            )


def _endpoints(table: Any) -> dict[str, str]:
    given = _table(("endpoints",), table)
    _known(("endpoints",), given, PURPOSES)
    for purpose, value in given.items():
        keys = ("endpoints", purpose)
        path = _text(keys, value)
        if not _PATH.fullmatch(path) or ".." in path or "//" in path:
            raise DefinitionError(
                keys, f"takes a path such as /{purpose}, without host and query, not {path!r}"
            )
        if harm := _HARMFUL.search(path.lower()):
            raise DefinitionError(
                keys,
                f"{path!r} may do more than tell ({harm[0].strip('/_.-')}): it is asked with GET "
                "every few seconds, so give a path that only reads",
            )
    return dict(given)


def _metrics(table: Any) -> MetricNames:
    given = _table(("metrics",), table)
    counts = ("tokens", "running", "waiting", "routed")
    _known(("metrics",), given, (*counts, "label"))
    names: dict[str, Any] = {}
    for key in counts:
        value = given.get(key, ())
        values = (value,) if isinstance(value, str) else _list(("metrics", key), value)
        names[key] = tuple(_text(("metrics", key), each) for each in values)
    return MetricNames(**names, label=_text(("metrics", "label"), given.get("label", "engine")))


def _roles(table: Any) -> Iterator[RolePattern]:
    given = _table(("roles",), table)
    _known(("roles",), given, tuple(Role))
    for key, texts in given.items():
        for text in (texts,) if isinstance(texts, str) else _list(("roles", key), texts):
            # Titles are read a few times a minute, and one by one: no literal is needed.
            compiled = _compiled(("roles", key), text)
            yield RolePattern(role=Role(key), pattern=re.compile(compiled.pattern.decode()))


def _context(text: Any) -> re.Pattern[str] | None:
    if text is None:
        return None
    compiled = _compiled(("context",), text)
    if "tokens" not in compiled.groupindex:
        raise DefinitionError(
            ("context",), r"has no group 'tokens': write --max-len (?P<tokens>\d+), say"
        )
    return re.compile(compiled.pattern.decode())


# ---------------------------------------------------------------------- types of values


def _table(keys: tuple[str, ...], value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DefinitionError(keys, f"takes a table, not {value!r}")
    return value


def _list(keys: tuple[str, ...], value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        raise DefinitionError(keys, f"takes a string or a list of strings, not {value!r}")
    return value


def _text(keys: tuple[str, ...], value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DefinitionError(keys, f"takes a string, not {value!r}")
    return value


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise DefinitionError((key,), f"takes true or false, not {value!r}")
    return value


def _seconds(keys: tuple[str, ...], value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise DefinitionError(keys, f"takes a number of seconds greater than 0, not {value!r}")
    return float(value)


def _known(keys: tuple[str, ...], given: Mapping[str, Any], known: Iterable[str]) -> None:
    names = tuple(known)
    for key in given:
        if key not in names:
            raise DefinitionError((*keys, key), f"unknown key; {_nearest(key, names, 'keys')}")


def _nearest(name: str, known: tuple[str, ...], kind: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"the {kind} are " + ", ".join(known)


# ---------------------------------------------------------------------- regular expressions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    compiled: re.Pattern[bytes]
    needle: bytes


def _pattern(keys: tuple[str, ...], text: Any) -> _Pattern:
    """Return an expression together with the literal that every match of it contains."""
    compiled = _compiled(keys, text)
    needle = literal(compiled.pattern.decode()) if not compiled.flags & _UNLITERAL else ""
    if len(needle) < MIN_NEEDLE:
        remedy = " or give needle" if keys == ("heartbeat",) else ""
        raise DefinitionError(
            keys,
            f"needs {MIN_NEEDLE} characters in a row that stand in every such line, outside "
            f"groups, classes and alternatives: write them out{remedy}",
        )
    return _Pattern(compiled=compiled, needle=needle.encode())


_UNLITERAL: Final = re.IGNORECASE | re.VERBOSE


def _compiled(keys: tuple[str, ...], text: Any) -> re.Pattern[bytes]:
    text = _text(keys, text)
    if len(text) > MAX_PATTERN:
        raise DefinitionError(keys, f"is longer than {MAX_PATTERN} characters: shorten it")
    try:
        compiled = re.compile(text.encode())
    except (re.error, RecursionError, OverflowError) as error:
        raise DefinitionError(
            keys, f"is no regular expression: {error}; quote it with '…', where \\ stays \\"
        ) from error
    if trouble := _slow(text):
        raise DefinitionError(keys, trouble)
    if compiled.search(b""):
        raise DefinitionError(keys, "matches an empty line: write out what the line must contain")
    return compiled


@dataclass(frozen=True, slots=True)
class _Token:
    """A piece of an expression: what it is, and how it is repeated.

    Attributes:
        kind: ``(``, ``)``, ``|``, ``text`` (a character that stands for itself), ``any`` (``.``, a
            class, an escape) or ``place`` (what has no width).
        text: The character that it stands for, or the piece itself.
        repeated: Whether it has a repeat.
        varies: Whether it may stand there more or less often.
        unbounded: Whether there is no limit to that.
        optional: Whether it may be absent.
    """

    kind: str
    text: str
    repeated: bool = False
    varies: bool = False
    unbounded: bool = False
    optional: bool = False


_PIECE: Final = re.compile(
    r"(?P<open>\((?:\?(?:P<\w+>|P=\w+\)|[a-zA-Z-]*:|[=!>]|<[=!]|#[^)]*\)|\(\w+\)|[a-zA-Z-]+\)))?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<place>[\^$]|\\[AbBZ])"
    r"|(?P<any>\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\\[a-zA-Z0-9](?:[0-9a-fA-F]{2})?)"
    r"|(?P<text>\\.|[^\\])",
    re.DOTALL,
)
_REPEAT: Final = re.compile(r"(?P<how>[*+?]|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})[?+]?")


def _tokens(pattern: str) -> Iterator[_Token]:
    at = 0
    while at < len(pattern):
        piece = _PIECE.match(pattern, at)
        if piece is None:
            return
        at = piece.end()
        kind = piece.lastgroup or ""
        text = piece[0]
        if kind == "open":
            kind = "place" if text.endswith(")") else "("
        elif kind in ("close", "bar"):
            kind = ")" if kind == "close" else "|"
        elif kind == "text":
            text = text[-1]
        repeat = _REPEAT.match(pattern, at) if kind not in ("(", "|") else None
        if repeat is None or repeat["how"] == "{}":
            yield _Token(kind, text)
            continue
        at = repeat.end()
        how, most = repeat["how"], repeat["most"]
        unbounded = how in "*+" or (repeat["comma"] == "," and not most)
        fixed = how[0] == "{" and not repeat["comma"]
        optional = how in "*?" or (how[0] == "{" and int(repeat["least"] or 0) == 0)
        yield _Token(
            kind, text, repeated=True, varies=not fixed, unbounded=unbounded, optional=optional
        )


def literal(pattern: str) -> str:
    """Return the longest run of characters that every match of *pattern* contains, or ``""``."""
    runs = [""]
    depth = 0
    for token in _tokens(pattern):
        depth += {"(": 1, ")": -1}.get(token.kind, 0)
        if token.kind == "|" and depth == 0:
            return ""
        if token.kind == "text" and depth == 0 and not token.optional:
            runs[-1] += token.text
            if token.repeated:
                runs.append("")
        elif not (token.kind == "place" and depth == 0):
            runs.append("")
    return max(runs, key=len)


def _slow(pattern: str) -> str:
    """Say what in *pattern* may take for ever, or ``""``."""
    varies = [False]  # of each group that is open, whether it can match one text in several ways
    runs = 0
    for token in _tokens(pattern):
        if token.kind == "(":
            varies.append(False)
            continue
        if token.kind == ")":
            inner = varies.pop() if len(varies) > 1 else False
            if inner and token.unbounded:
                return (
                    "repeats a group without limit in which something is repeated, too, or chosen, "
                    "which can take for ever: give the outer repeat a limit, {1,8} for *, say"
                )
            varies[-1] = varies[-1] or inner
        elif token.kind == "any" and token.unbounded and token.text in (".", r"\S", r"\W", r"\D"):
            runs += 1
        ambiguous = token.kind == "|" or (token.varies and token.kind != "place")
        varies[-1] = varies[-1] or ambiguous
    if runs > MAX_RUNS:
        return (
            f"has {runs} repeats of anything without limit, which take long to fail: give them "
            "one, .{0,200} for .*, say"
        )
    return ""

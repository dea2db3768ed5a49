"""What an engine's HTTP endpoints say, turned into values.

The engine's own words decide, not the status code: before LMDeploy 0.14 ``/health`` answers 200
for as long as HTTP lives, and a 503 may mean "starting" as well as "blocked". A status code tells
only where the words do not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from hangwatch.model.dossier import MetricSample
from hangwatch.model.profile import EngineProfile, HealthMeaning
from hangwatch.model.time import Instant
from hangwatch.model.vitals import Counters, Health, Outcome

MAX_MESSAGE: Final = 500
"""Characters of a message that are kept."""

MAX_SAMPLE: Final = 4096
"""Characters of a line of metrics; matching one of megabytes takes hundreds of them."""

MAX_ENGINES: Final = 1024
"""Labels in one answer; a server has a dozen."""

_SAMPLE: Final = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]*)\s*"
    r'(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s*'
    r"(?P<value>[^\s#]+)"
)
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_TIMED_OUT: Final = re.compile(r"time[d]?[ -]?out", re.IGNORECASE)
_REFUSED: Final = re.compile(r"refused", re.IGNORECASE)


def health_of_answer(
    http: int, body: bytes, profile: EngineProfile, *, at: Instant, elapsed: float = 0.0
) -> Health:
    """Return what an answer of the health endpoint says.

    An answer that cannot be one of a health endpoint (a redirect, 401, 404 …) is ``FAILED``: it
    proves that HTTP lives and says nothing of the engine.
    """
    status, message = _words(body)
    return health_of_words(
        profile, at=at, http=http, status=status, message=message, elapsed=elapsed
    )


def health_of_words(
    profile: EngineProfile,
    *,
    at: Instant,
    http: int | None = None,
    status: str = "",
    message: str = "",
    error: str = "",
    elapsed: float = 0.0,
) -> Health:
    """Return the same for an answer that was taken down by somebody else.

    Args:
        profile: Knows the engine's words.
        at: When the answer was had.
        http: Status code; ``None`` if there was no answer.
        status: The engine's own word.
        message: The engine's own sentence.
        error: Why there was no answer: ``timeout after 10 s``, ``Connection refused``.
        elapsed: Seconds that the request took.
    """
    if http is None and (error or not (status or message)):
        error = error or "no answer"
        return Health(at=at, outcome=outcome_of_error(error), message=_cut(error), elapsed=elapsed)
    if http is not None and http not in (503, 500) and not 200 <= http < 300:
        words = f"HTTP {http}" + (f": {message}" if message else "")
        return Health(
            at=at, outcome=Outcome.FAILED, http=http, message=_cut(words), elapsed=elapsed
        )
    return Health(
        at=at,
        outcome=Outcome.ANSWERED,
        http=http,
        status=_cut(status),
        message=_cut(message),
        meaning=_meaning(profile, http, status, message),
        elapsed=elapsed,
    )


def health_of_error(error: str, *, at: Instant, elapsed: float = 0.0) -> Health:
    """Return what it means that there was no answer."""
    return Health(at=at, outcome=outcome_of_error(error), message=_cut(error), elapsed=elapsed)


def says_sleeping(body: bytes) -> bool:
    """Say whether the answer of a *sleeping* endpoint is yes."""
    document = _document(body)
    return isinstance(document, Mapping) and document.get("is_sleeping") is True


def samples(text: str, names: tuple[str, ...] = ()) -> Iterator[tuple[int, MetricSample]]:
    """Yield every sample of a Prometheus text with its line, from 1.

    Lines that are no sample are skipped; so are time stamps and exemplars. A value may be NaN.
    With *names*, only samples whose names begin with one of them: histograms are most of a text.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if len(line) > MAX_SAMPLE or (names and not line.startswith(names)):
            continue
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        try:
            value = float(match["value"])
        except ValueError:
            continue
        labels = {key: _unescape(item) for key, item in _LABEL.findall(match["labels"] or "")}
        yield number, MetricSample(name=match["name"], value=value, labels=labels)


def counters(
    found: Iterable[MetricSample], profile: EngineProfile, *, at: Instant
) -> dict[str, Counters]:
    """Return the counters of each engine label; ``""`` where samples carry no such label.

    Engines are never summed: one that stalls beside others that move must show. ``None`` stands
    for what is not exported.
    """
    names = profile.metrics
    engines: dict[str, dict[str, list[float]]] = {}
    kinds = {
        **dict.fromkeys(names.tokens, "tokens"),
        **dict.fromkeys(names.running, "running"),
        **dict.fromkeys(names.waiting, "waiting"),
        **dict.fromkeys(names.routed, "routed"),
    }
    for sample in found:
        kind = kinds.get(sample.name)
        if kind is not None and math.isfinite(sample.value):
            label = sample.labels.get(names.label, "")
            if label not in engines and len(engines) >= MAX_ENGINES:
                continue
            engine = engines.setdefault(label, {})
            engine.setdefault(kind, []).append(sample.value)
    return {
        label: Counters(
            at=at,
            since=at,
            tokens=sum(kinds["tokens"]) if "tokens" in kinds else None,
            running=_requests(kinds.get("running")),
            waiting=_requests(kinds.get("waiting")),
            routed=_requests(kinds.get("routed")),
        )
        for label, kinds in engines.items()
    }


def counters_of_text(text: str, profile: EngineProfile, *, at: Instant) -> dict[str, Counters]:
    """Return the same of a whole answer."""
    names = profile.metrics
    wanted = (*names.tokens, *names.running, *names.waiting, *names.routed)
    found = samples(text, wanted) if wanted else ()
    return counters((sample for _, sample in found), profile, at=at)


def _requests(values: list[float] | None) -> int | None:
    """Add up gauges; upstream's ``waiting`` is briefly negative."""
    return None if values is None else sum(max(0, round(value)) for value in values)


def _meaning(
    profile: EngineProfile, http: int | None, status: str, message: str
) -> HealthMeaning | None:
    words = f"{status}: {message}"
    well = http is None or 200 <= http < 300
    for known in profile.health:
        if known.http and http not in known.http:
            continue
        if known.pattern.search(words) and (well or known.meaning is not HealthMeaning.HEALTHY):
            return known.meaning
    return HealthMeaning.HEALTHY if well and not status else HealthMeaning.UNHEALTHY


def outcome_of_error(error: str) -> Outcome:
    """Return what became of a request that ended with this error."""
    if _TIMED_OUT.search(error):
        return Outcome.TIMED_OUT
    return Outcome.REFUSED if _REFUSED.search(error) else Outcome.FAILED


def _words(body: bytes) -> tuple[str, str]:
    """Return status and message of a body: JSON as of LMDeploy, else the text itself."""
    document = _document(body)
    if isinstance(document, Mapping):
        status = document.get("status")
        message = document.get("message", document.get("detail", document.get("error")))
        return (
            status if isinstance(status, str) else "",
            message if isinstance(message, str) else "",
        )
    if document is None:
        return "", body.decode("utf-8", "replace").strip()
    return "", ""


def _document(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)

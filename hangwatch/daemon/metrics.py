"""Our own metrics: counted by the loop, told from a snapshot by the thread that serves them.

Label values are words and slugs of ours and names of instances; no host, no path, no text of a
stranger. The client library is loaded with this module, and this module with ``--listen`` only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from hangwatch import __version__
from hangwatch.core import fleet
from hangwatch.core.plain import printable
from hangwatch.model.identity import InstanceKey
from hangwatch.model.incident import Incident
from hangwatch.model.time import Clock, Instant
from hangwatch.model.verdict import Gone, Verdict
from hangwatch.system.endpoint import Answer, Routes

MAX_INSTANCES: Final = 512
"""Series of one metric."""

STUCK_AFTER: Final = 30.0
"""Seconds without a turn of the loop after which we are not healthy."""

WORDS: Final = tuple(kind.word for kind in get_args(Verdict))
RESULTS: Final = ("written", "failed", "withheld")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What is told, as of one turn of the loop.

    Attributes:
        at: When.
        verdicts: Changes into each verdict, by word and cause.
        incidents: Begun, by word and cause as of then.
        captures: Ended, by result.
        instances: Present ones, by word.
        last_beats: Last beat of each instance, by name.
        children_lost: Since the start.
        loop_pauses: Since the start.
        leases: Held now.
    """

    at: Instant
    verdicts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    incidents: Mapping[tuple[str, str], int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)
    instances: Mapping[str, int] = field(default_factory=dict)
    last_beats: Mapping[str, Instant] = field(default_factory=dict)
    children_lost: int = 0
    loop_pauses: int = 0
    leases: int = 0


class Metrics:
    """Counts what happens, and publishes it."""

    def __init__(self, clock: Clock) -> None:
        """Have counted nothing.

        Args:
            clock: Ours.
        """
        self._clock = clock
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._incidents: Counter[tuple[str, str]] = Counter()
        self._captures: Counter[str] = Counter()
        self._snapshot = Snapshot(at=clock.now())
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Told(lambda: self._snapshot, clock))

    def changed(self, verdict: Verdict) -> None:
        """Count a change into *verdict*."""
        self._verdicts[verdict.word, verdict.cause] += 1

    def began(self, incident: Incident) -> None:
        """Count an incident."""
        self._incidents[incident.verdict.word, incident.verdict.cause] += 1

    def captured(self, result: str) -> None:
        """Count a capture that was ``written``, ``failed`` or ``withheld``."""
        self._captures[result] += 1

    def publish(
        self, state: fleet.State, *, children_lost: int, loop_pauses: int, leases: int
    ) -> None:
        """Tell this from now on."""
        self._snapshot = Snapshot(
            at=self._clock.now(),
            verdicts=dict(self._verdicts),
            incidents=dict(self._incidents),
            captures=dict(self._captures),
            instances=Counter(verdict.word for verdict in state.verdicts.values()),
            last_beats=_last_beats(state),
            children_lost=children_lost,
            loop_pauses=loop_pauses,
            leases=leases,
        )

    def routes(self) -> Routes:
        """Return what answers for us."""
        return {"/metrics": self._metrics, "/healthz": self._health}

    def _metrics(self) -> Answer:
        return Answer(body=generate_latest(self._registry), kind=CONTENT_TYPE_LATEST)

    def _health(self) -> Answer:
        idle = self._clock.now() - self._snapshot.at
        if idle <= STUCK_AFTER:
            return Answer(body=b"ok\n")
        return Answer(body=f"the loop has not turned for {idle:.0f} s\n".encode(), status=503)


def _last_beats(state: fleet.State) -> dict[str, Instant]:
    """Return when each instance beat last, by a name that says nothing of a host.

    Those that share a name are told apart by their labels of themselves; those that share that,
    too, are told as one, the one that beat longest ago.
    """
    beats = [
        (key, tracked.vitals.last.at)
        for key, tracked in state.instances.items()
        if tracked.vitals.last is not None and not isinstance(tracked.verdict, Gone)
    ][:MAX_INSTANCES]
    names = Counter(_name(key) for key, _ in beats)
    told: dict[str, Instant] = {}
    for key, at in beats:
        name = _name(key)
        label = f"{name} {key.tag}" if names[name] > 1 and key.pid is not None else name
        label = printable(label)  # a log's name need not be text, and names instances
        told[label] = min(at, told.get(label, at))
    return told


def _name(key: InstanceKey) -> str:
    return InstanceKey(pid=key.pid, tag=key.tag).name


class _Told:
    """Makes metrics of the newest snapshot whenever somebody asks."""

    def __init__(self, snapshot: Any, clock: Clock) -> None:
        self._snapshot = snapshot
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        told: Snapshot = self._snapshot()
        yield _counted(
            "hangwatch_verdicts", "Changes into a verdict.", ("verdict", "cause"), told.verdicts
        )
        yield _counted(
            "hangwatch_incidents",
            "Incidents, by verdict and cause as of their beginning.",
            ("verdict", "cause"),
            told.incidents,
        )
        results = {(result,): told.captures.get(result, 0) for result in RESULTS}
        yield _counted("hangwatch_captures", "Captures, by how they ended.", ("result",), results)
        instances = GaugeMetricFamily(
            "hangwatch_instances", "Instances, by their present verdict.", labels=("verdict",)
        )
        for word in WORDS:
            instances.add_metric((word,), told.instances.get(word, 0))
        yield instances
        silence = GaugeMetricFamily(
            "hangwatch_seconds_since_last_beat",
            "Seconds since an instance's last heartbeat.",
            labels=("instance",),
        )
        now = self._clock.now()
        for name, at in told.last_beats.items():
            silence.add_metric((name,), max(0.0, now - at))
        yield silence
        yield CounterMetricFamily(
            "hangwatch_children_lost",
            "Children of hangwatch that died, fell silent or took nothing.",
            value=told.children_lost,
        )
        yield CounterMetricFamily(
            "hangwatch_loop_pauses",
            "Pauses of hangwatch's own loop that were too long to have listened.",
            value=told.loop_pauses,
        )
        yield GaugeMetricFamily("hangwatch_leases", "Announced pauses now.", value=told.leases)
        build = GaugeMetricFamily(
            "hangwatch_build_info", "1, with the version of hangwatch.", labels=("version",)
        )
        build.add_metric((__version__,), 1)
        yield build


def _counted(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for label_values, value in sorted(values.items()):
        family.add_metric(label_values, value)
    return family

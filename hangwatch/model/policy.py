"""How patient to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits of silence, in seconds unless said otherwise.

    Attributes:
        heartbeat_interval: Time between beats; ``None`` takes the profile's.
        stall_after: Silence that is suspicious while nothing excludes a long prefill.
        calibrate: Whether ``stall_after`` follows the gaps that were seen to end by themselves; a
            limit that somebody set stays as it is.
        missed_beats: Intervals of silence that suffice where a witness excludes one.
        together: Instances that fall silent within this many intervals belong to one incident.
        child_silence: A child that says nothing for so long makes its instances ``blind``.
        loop_gap: A pause in our own loop longer than this does not count as listening.
        cool_down: Time after a capture in which the same instances start no new one.
        poll_interval: Time between two looks of the loop.
        probe_interval: Time between two requests at one endpoint of a server, captures aside.
        sample_gap: Pause between the two samples of stage A.
        pause_limit: A sleep that lasts longer is suspicious itself. Longer than XTuner waits for a
            rollout (5 h, ROLLOUT_RAY_GET_TIMEOUT in its rl/rollout/worker.py).
        lease_limit: The longest lease that is granted.
        starved_after: Time without work in the whole fleet that is worth a notice, while a job
            runs.
        aftermath: How long after a bundle what it is about is looked at again; a last look is
            taken at the end. Empty: not at all.
        job_running: Whether a job is known to run that should bring work, whoever sees it.
    """

    heartbeat_interval: float | None = None
    stall_after: float = 120.0
    calibrate: bool = False
    missed_beats: int = 3
    together: float = 3.0
    child_silence: float = 5.0
    loop_gap: float = 3.0
    cool_down: float = 600.0
    poll_interval: float = 1.0
    probe_interval: float = 10.0
    sample_gap: float = 5.0
    pause_limit: float = 21_600.0
    lease_limit: float = 7200.0
    starved_after: float = 1800.0
    aftermath: tuple[float, ...] = (300.0, 1800.0)
    job_running: bool = False

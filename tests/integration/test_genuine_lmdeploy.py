"""The profile on the genuine article: LMDeploy's own logger classes print, and we parse."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from hangwatch.core import parsing
from hangwatch.model.heartbeat import Heartbeat, Line
from hangwatch.model.observation import BeatSeen
from hangwatch.model.time import Instant
from hangwatch.profiles.lmdeploy import PROFILE

pytestmark = [pytest.mark.network, pytest.mark.slow]

# Imports the logger out of an unpacked wheel, whose heavy dependencies are stood in for, lets it
# print one interval with tokens and one without, and ends.
DRIVER = r"""
import sys, types

root = sys.argv[1]
sys.path.insert(0, root)


class Array(list):
    def __init__(self, items):
        super().__init__(items)

    def __iadd__(self, other):
        return Array(a + b for a, b in zip(self, other))

    def __truediv__(self, number):
        return Array(a / number for a in self)


def package(name, **content):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


class Quiet:
    def __getattr__(self, name):
        return lambda *a, **k: None


package("numpy", ndarray=list, sum=sum, zeros=lambda n: Array([0.0] * n),
        array=lambda items: Array(items))
package("lmdeploy").__path__ = [root + "/lmdeploy"]
package("lmdeploy.utils", get_logger=lambda *a, **k: Quiet())
messages = types.ModuleType("lmdeploy.messages")
messages.__getattr__ = lambda name: type(name, (), {})
sys.modules["lmdeploy.messages"] = messages

from lmdeploy.metrics import loggers, stats

logger = loggers.LoggingStatLogger(dp_rank=3)
schedule = stats.SchedulerStats()
for name, value in {
    "num_total_reqs": 12, "num_finished_reqs": 7, "num_completed_reqs": 7,
    "num_succeeded_reqs": 7, "num_api_routed_reqs": 4, "num_running_reqs": 3,
    "num_waiting_reqs": 1, "gpu_cache_usage": 0.25, "prefix_cache_hit_rate": 0.5,
}.items():
    try:
        setattr(schedule, name, value)
    except AttributeError:
        pass  # a property of this version

class Iteration:
    num_prompt_tokens = prompt_tokens = 100
    num_generation_tokens = new_generation_tokens = 50

logger.last_log_time -= 10
if hasattr(logger, "record_schedule"):
    logger.record_schedule(schedule)
    logger.record_iteration(Iteration())
    if hasattr(stats, "SpeculativeDecodingStats"):
        spec = stats.SpeculativeDecodingStats(num_spec_tokens=2)
        spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens = 10, 20, 12
        spec.num_accepted_tokens_per_pos = Array([8.0, 4.0])
        logger.record_specdecode(spec)
else:
    logger.record(schedule, Iteration())
logger.log()
sys.stdout.flush()
print("--- idle", flush=True)
logger.last_log_time -= 10
logger.log()
"""


def cache() -> Path:
    base = os.environ.get("HANGWATCH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hangwatch" / "wheels"


def wheel(version: str) -> Path:
    """Return the published wheel, downloaded once."""
    platforms = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    return downloaded(
        f"lmdeploy-{version}-*.whl", "--python-version", "3.11", *platforms, f"lmdeploy=={version}"
    )


def downloaded(pattern: str, *arguments: str) -> Path:
    """Return the wheel that *pattern* names, put into the cache by pip if it is not there.

    Tests run side by side and share the cache, so that a wheel appears in it whole or not at all.
    """
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    if found := list(folder.glob(pattern)):
        return found[0]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        try:
            done = subprocess.run(
                [*pip, "--no-deps", "--only-binary", ":all:", "-d", fresh, *arguments],
                capture_output=True,
                text=True,
                timeout=80,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("the package index is too slow")
        for path in Path(fresh).glob("*.whl"):
            path.replace(folder / path.name)
    found = list(folder.glob(pattern))
    if not found:
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip()[-200:]}")
    return found[0]


def printed(version: str, tmp_path: Path) -> tuple[list[Heartbeat], list[Heartbeat]]:
    """Return the beats that a busy and an idle interval of this version print."""
    with zipfile.ZipFile(wheel(version)) as archive:
        for name in archive.namelist():
            if name.startswith("lmdeploy/metrics/") and name.endswith(".py"):
                archive.extract(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", "-c", DRIVER, str(tmp_path)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"" == done.stderr
    busy, idle = done.stdout.split(b"--- idle\n")
    return beats(busy), beats(idle)


def beats(output: bytes) -> list[Heartbeat]:
    found = []
    for text in output.splitlines():
        line = Line(source="stdout", text=text, at=Instant(0.0))
        found += [s.beat for s in parsing.parse(line, (PROFILE,)) if isinstance(s, BeatSeen)]
    return found


@pytest.mark.parametrize("version", ["0.9.2", "0.12.1", "0.18.0"])
def test_a_busy_interval_of_the_real_logger_is_one_beat_with_its_numbers(
    version: str, tmp_path: Path
):
    (beat,), _ = printed(version, tmp_path)

    assert beat.instance.tag == "DP3"
    assert beat.printed is not None
    assert beat.in_tps == pytest.approx(10.0, rel=0.2)
    assert beat.out_tps == pytest.approx(5.0, rel=0.2)
    assert (3, 1) == (beat.running, beat.waiting)
    assert beat.kv_cache_pct == 25.0
    assert beat.finished == 7
    assert beat.in_flight is not None
    assert beat.in_flight >= 4


@pytest.mark.parametrize(("version", "count"), [("0.9.2", 1), ("0.12.1", 0), ("0.18.0", 0)])
def test_an_idle_interval_prints_only_in_the_oldest_version(
    version: str, count: int, tmp_path: Path
):
    _, idle = printed(version, tmp_path)

    assert count == len(idle)
    assert all(beat.tps == 0 for beat in idle)


def test_the_newest_logger_tells_its_draft_acceptance(tmp_path: Path):
    (beat,), _ = printed("0.18.0", tmp_path)

    assert beat.draft_acceptance_pct == 60.0
    assert beat.prefix_hit_pct == 50.0

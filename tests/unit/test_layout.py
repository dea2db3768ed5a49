"""Where things lie: one table of names for the writer and the reader."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import PurePosixPath

import pytest

from hangwatch.core.layout import Kind, bundle_name, is_bundle_name, place
from hangwatch.model.capture import Target
from hangwatch.model.identity import ProcessId, Role


@pytest.mark.parametrize(
    ("path", "kind", "sample"),
    [
        ("threads.json", Kind.THREADS, 1),
        ("threads2.json", Kind.THREADS, 2),
        ("anywhere/procs2.json", Kind.PROCESSES, 2),
        ("health.json", Kind.HEALTH, 1),
        ("metrics2.prom", Kind.METRICS, 2),
        ("gpu/gpu.csv", Kind.GPU, 1),
        ("gpu/gpu_series.csv", Kind.OTHER, 1),
        ("gpu/nvidia_smi.txt", Kind.OTHER, 1),
        ("gpu.err", Kind.GPU_PROBLEM, 1),
        ("kmsg.txt", Kind.KERNEL_LOG, 1),
        ("topology.json", Kind.FACTS, 1),
        ("driver.log", Kind.LOG, 1),
        ("session/logs/worker-aa-02000000-5001.out.1", Kind.LOG, 1),
        ("log.txt", Kind.LOG, 1),
        ("arrival.txt", Kind.REPLAY, 1),
        ("expect.json", Kind.EXPECTATION, 1),
        ("REPORT.md", Kind.REPORT, 1),
        ("weights.bin", Kind.OTHER, 1),
    ],
)
def test_a_file_is_known_by_its_name_wherever_it_lies(path: str, kind: Kind, sample: int):
    found = place(path)

    assert (kind, sample) == (found.kind, found.sample)


def test_the_folder_of_a_target_says_whose_its_files_are():
    target = Target(process=ProcessId(4242), role=Role.API_SERVER)

    found = place(str(PurePosixPath(target.folder, "threads.json")))

    assert (4242, "api_server") == (found.pid, found.role)


def test_a_kernel_stack_names_its_process():
    assert 66 == place("stack_66.txt").pid


def test_a_bundles_name_is_known_again():
    name = bundle_name(datetime(2026, 3, 4, 5, 44, 59, tzinfo=UTC), "a1b2c3")

    assert "hangwatch-20260304T054459Z-a1b2c3.tar.gz" == name
    assert is_bundle_name(name)


def test_a_work_directory_does_not_look_like_a_bundle():
    assert not is_bundle_name("hangwatch-20260304T054459Z-a1b2c3.tar.gz.partial")

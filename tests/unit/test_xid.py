"""What the driver reports of GPUs in the kernel log."""

from __future__ import annotations

import pytest

from hangwatch.core.xid import MEANINGS, Origin, Xid, gpu_index, parse

# Lines as drivers of different years print them. The first was provoked on an H200 (driver 580),
# the last is of NVIDIA/open-gpu-kernel-modules issue 1118.
LINES = {
    "of a bad address": (
        (
            "[  243.387022] NVRM: Xid (PCI:0000:00:06): 31, pid=1267, name=python3, channel "
            "0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_6 faulted "
            "@ 0x0_00000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ"
        ),
        Xid(
            code=31, address="0000:00:06", at=243.387022, pid=1267, process="python3",
            text="channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 "
            "GPCCLIENT_T1_6 faulted @ 0x0_00000000. Fault is of type FAULT_PDE "
            "ACCESS_TYPE_VIRT_READ", line=1,
        ),
    ),
    "by dmesg": (
        "[ 1850.100112] NVRM: Xid (PCI:0000:4a:00): 45, pid=40877, name=python3, Ch 0000000a",
        Xid(
            code=45, address="0000:4a:00", at=1850.100112, pid=40877, process="python3",
            text="Ch 0000000a", line=1,
        ),
    ),
    "by /dev/kmsg": (
        ("3,1234,1850100112,-;NVRM: Xid (PCI:0000:4A:00): 119, pid=7, name=ray::Worker, Timeout "
        "after 45s of waiting for RPC response from GPU1 GSP! Expected function 76"),
        Xid(
            code=119, address="0000:4a:00", at=1850.100112, pid=7, process="ray::Worker",
            text="Timeout after 45s of waiting for RPC response from GPU1 GSP! "
            "Expected function 76", line=1,
        ),
    ),
    "nobody known": (
        ("NVRM: Xid (PCI:0000:c6:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the "
        "bus."),
        Xid(code=79, address="0000:c6:00", text="GPU has fallen off the bus.", line=1),
    ),
    "of an old driver": (
        ("Nov 22 18:29:55 node kernel: [  966.503025] NVRM: Xid (0000:01:00): 31, Ch 0000000b, "
        "engmask 00000120, intr 10000000"),
        Xid(
            code=31, address="0000:01:00", text="Ch 0000000b, engmask 00000120, intr 10000000",
            line=1,
        ),
    ),
    "of a row of memory": (
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, "
        "reset gpu to activate."),
        Xid(
            code=63, address="0000:10:1c", pid=1896,
            text="Row Remapper: New row marked for remapping, reset gpu to activate.", line=1,
        ),
    ),
    "of a switch": (
        ("nvidia-nvswitch1: SXid (PCI:0000:aa:00.0): 24007, Severity 1 Engine instance 12 "
        "Sub-engine instance 00"),
        Xid(
            code=24007, address="0000:aa:00", switch=True,
            text="Severity 1 Engine instance 12 Sub-engine instance 00", line=1,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "expected"), LINES.values(), ids=LINES)
def test_a_report_is_read_whatever_the_driver_and_the_log(line: str, expected: Xid):
    assert (expected,) == parse([line])


def test_reports_are_found_among_other_lines_with_their_numbers():
    log = ["[    0.000000] Linux version 6.18", LINES["nobody known"][0], "eth0: link up"] * 2

    assert [2, 5] == [each.line for each in parse(log)]


def test_a_code_that_is_not_in_the_table_has_no_meaning_and_neither_has_one_of_a_switch():
    known, unknown, switch = parse(
        [
            "NVRM: Xid (PCI:0000:c6:00): 79, GPU has fallen off the bus.",
            "NVRM: Xid (PCI:0000:c6:00): 999, who knows",
            "nvidia-nvswitch1: SXid (PCI:0000:aa:00.0): 79, Fatal",
        ]
    )

    assert MEANINGS[79] == known.meaning
    assert (None, None) == (unknown.meaning, switch.meaning)


def test_faults_of_a_program_are_told_from_those_of_the_machine():
    assert {13, 31, 43, 45} <= {c for c, each in MEANINGS.items() if each.origin is Origin.PROGRAM}
    assert not MEANINGS[63].ends_work


@pytest.mark.parametrize(
    ("address", "expected"), [("0000:4a:00", 1), ("0001:4a:00", None), ("nonsense", None)]
)
def test_a_report_leads_to_the_gpu_of_the_table(address: str, expected: int | None):
    bus_ids = {0: "00000000:06:00.0", 1: "00000000:4A:00.0", 2: "[N/A]"}

    assert expected == gpu_index(address, bus_ids)

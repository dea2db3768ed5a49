"""What files of the kernel mean, without a kernel."""

from __future__ import annotations

import pytest

from hangwatch.core import cgroups, descriptors, futexes, kernel_log, locks, mountinfo, mounts
from hangwatch.core.connections import Connection, End, Holder, Waiting, edge, fullness
from hangwatch.core.scheduling import Pace, grown, pace
from hangwatch.core.syscall_numbers import NAMES
from hangwatch.core.syscalls import FAULT, Call, decode
from hangwatch.model.process import ThreadRow
from hangwatch.system import cgroupfs

# ---------------------------------------------------------------------- system calls


@pytest.mark.parametrize(
    ("machine", "number", "name"),
    [
        ("x86_64", 0, "read"),
        ("x86_64", 35, "nanosleep"),
        ("x86_64", 61, "wait4"),
        ("x86_64", 202, "futex"),
        ("x86_64", 230, "clock_nanosleep"),
        ("x86_64", 232, "epoll_wait"),
        ("x86_64", 281, "epoll_pwait"),
        ("x86_64", 441, "epoll_pwait2"),
        ("x86_64", 449, "futex_waitv"),
        ("aarch64", 22, "epoll_pwait"),
        ("aarch64", 63, "read"),
        ("aarch64", 73, "ppoll"),
        ("aarch64", 98, "futex"),
        ("aarch64", 115, "clock_nanosleep"),
        ("aarch64", 128, "restart_syscall"),
        ("aarch64", 212, "recvmsg"),
        ("aarch64", 260, "wait4"),
        ("aarch64", 441, "epoll_pwait2"),
    ],
)
def test_a_number_means_what_it_means_on_its_machine(machine: str, number: int, name: str):
    assert name == NAMES[machine][number]


def test_no_two_numbers_of_a_machine_have_one_name():
    for names in NAMES.values():
        assert len(names) == len(set(names.values()))


def called(number: int, *arguments: int) -> Call:
    padded = (*arguments, *(0,) * (6 - len(arguments)), 0x7FFE, 0x7F00)
    found = decode(" ".join((str(number), *map(hex, padded))), "x86_64")
    assert found is not None
    return found


def test_a_futex_says_its_address_and_whether_others_may_use_it():
    assert {
        "name": "futex",
        "timeout_ms": None,
        "operation": "wait_bitset",
        "address": "0x7f3a",
        "shared": False,
    } == called(202, 0x7F3A, 0x189, 0, 0).document()
    assert called(202, 0x7F3A, 0, 0, 0x7FFE).detail["shared"]


def test_who_wakes_others_at_a_futex_waits_for_nobody():
    assert {"name": "futex"} == called(202, 0x7F3A, 1).document()


def test_no_limit_is_null_a_known_one_is_in_milliseconds_and_an_unknown_one_is_left_out():
    assert None is called(232, 5, 0x7F, 8, 0xFFFFFFFF).document()["timeout_ms"]
    assert 1500 == called(232, 5, 0x7F, 8, 1500).document()["timeout_ms"]
    assert None is called(271, 0x7F, 2, 0).document()["timeout_ms"]  # ppoll without a time
    assert "timeout_ms" not in called(271, 0x7F, 2, 0x7FFE).document()
    assert "timeout_ms" not in called(230, 1, 0, 0x7FFE).document()  # clock_nanosleep


def test_a_call_that_names_no_descriptor_has_none():
    assert () == called(9, 0, 4096, 3, 0x22, 0xFFFFFFFFFFFFFFFF, 0).fds  # anonymous memory
    assert (7, 5) == called(40, 7, 5).fds  # sendfile


def test_a_sleep_in_the_kernel_without_a_call_is_a_page_fault():
    found = decode("-1 0x7ffe 0x7f00", "x86_64")

    assert found is not None
    assert FAULT == found.name


@pytest.mark.parametrize("state", ["T", "t", "Z", "R"])
def test_who_was_stopped_outside_of_a_call_or_has_ended_is_in_none(state: str):
    assert decode("-1 0x7ffc18a5cfa0 0x7f301f0fcc86", "x86_64", state) is None


@pytest.mark.parametrize("text", ["running", "", "nonsense", "0 zz"])
def test_what_says_no_call_is_none(text: str):
    assert decode(text, "x86_64") is None


def test_a_number_that_is_not_known_stays_a_number():
    assert "9999" == called(9999).name
    found = decode("0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0", "riscv64")
    assert found is not None
    assert "0" == found.name


# ---------------------------------------------------------------------- scheduling

ASLEEP = ThreadRow(
    tid=7, comm="t", state="S", run_ns=1000, wait_ns=10, slices=5, vol_ctxt=5, invol_ctxt=0
)
NOTHING = dict.fromkeys(("run_ns", "wait_ns", "slices", "vol_ctxt", "invol_ctxt"), 0)


@pytest.mark.parametrize(
    ("state", "grew", "expected"),
    [
        ("S", {}, Pace.FROZEN),
        ("S", {"vol_ctxt": 1}, Pace.TICKING),
        ("S", {"wait_ns": 5_000_000}, Pace.FROZEN),
        ("S", {"run_ns": 200_000_000, "vol_ctxt": 900}, Pace.BUSY),
        ("R", {"run_ns": 1_900_000_000}, Pace.SPINNING),
        ("D", {}, Pace.BLOCKED),
        ("T", {"run_ns": 1_900_000_000}, Pace.STOPPED),
        ("t", {}, Pace.STOPPED),
    ],
)
def test_what_a_thread_did_in_two_seconds(state: str, grew: dict[str, int], expected: Pace):
    assert expected == pace(state, NOTHING | grew, 2.0)


def test_a_number_that_another_thread_has_now_is_not_compared():
    later = ThreadRow(tid=7, comm="u", state="S", run_ns=10, vol_ctxt=1)

    assert grown(ASLEEP, later) is None
    assert NOTHING == grown(ASLEEP, ASLEEP)


# ---------------------------------------------------------------------- descriptors, locks


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ("pipe:[12]", "pipe"),
        ("socket:[13]", "socket"),
        ("anon_inode:[eventfd]", "eventfd"),
        ("anon_inode:[eventpoll]", "eventpoll"),
        ("anon_inode:inotify", "inotify"),
        ("/dev/nvidia0", "device"),
        ("/dev/shm/sem.x (deleted)", "file"),
        ("/memfd:x (deleted)", "memfd"),
        ("/proc/5/stat", "kernel"),
        ("/mnt/weights/model.safetensors", "file"),
        ("", ""),
    ],
)
def test_a_link_says_what_a_descriptor_is(link: str, kind: str):
    assert kind == descriptors.kind(link)


def test_a_timer_says_when_it_is_due():
    info = (
        "pos:\t0\nflags:\t02004002\nclockid: 1\nticks: 0\nsettime flags: 00\n"
        "it_value: (3, 500000000)\nit_interval: (1, 0)\n"
    )

    found = descriptors.describe(9, "anon_inode:[timerfd]", info)

    assert (3.5, 1.0) == (found["due_in_s"], found["interval_s"])
    assert ["nonblock", "cloexec"] == found["flags"]


PROC_LOCKS = """\
1: POSIX  ADVISORY  WRITE 55 fe:00:12 0 EOF
2: FLOCK  ADVISORY  WRITE 60 00:2e:34 0 EOF
2: -> FLOCK  ADVISORY  WRITE 61 00:2e:34 0 EOF
2:  -> FLOCK  ADVISORY  READ 62 00:2e:34 0 EOF
3: OFDLCK ADVISORY  READ -1 fe:00:13 128 255
"""


def test_locks_and_who_waits_for_them_are_told_apart():
    found = locks.parse(PROC_LOCKS)

    assert ["posix", "flock", "flock", "flock", "ofd"] == [each.kind for each in found]
    assert [False, False, True, True, False] == [each.blocked for each in found]
    assert (("fe:00", 13), (128, 255)) == (found[4].file, found[4].span)


def test_a_lock_that_nobody_in_sight_holds_is_listed_for_who_waits():
    wait = locks.Wait(pid=1, tid=2, fd=3, path="/a.lock", inode=99, operation="LOCK_EX")

    (record,) = locks.table((), (), (wait,), {})

    assert ([], "/a.lock", 1) == (record["holders"], record["path"], len(record["waiters"]))


WRITTEN_BY_60 = locks.Hold(
    pid=60,
    fd=4,
    path="/cache/a.lock",
    lock=locks.parse("2: FLOCK  ADVISORY  WRITE 60 00:2e:34 0 EOF")[0],
)
SAME_NUMBER = locks.Hold(
    pid=70,
    fd=4,
    path="/other/b.lock",
    lock=locks.parse("9: FLOCK  ADVISORY  WRITE 70 00:99:34 0 EOF")[0],
)


@pytest.mark.parametrize("inode", [34, 0], ids=["number known", "number not known"])
def test_a_waiter_waits_for_who_holds_the_lock_of_its_own_file(inode: int):
    wait = locks.Wait(pid=61, tid=61, fd=3, path="/cache/a.lock", inode=inode, operation="LOCK_EX")

    held, other = locks.table((), (WRITTEN_BY_60, SAME_NUMBER), (wait,), {})

    assert ("/cache/a.lock", [61]) == (held["path"], [each["pid"] for each in held["waiters"]])
    assert ("/other/b.lock", []) == (other["path"], other["waiters"])


def test_files_whose_numbers_are_not_known_are_not_taken_for_one():
    waits = [
        locks.Wait(pid=pid, tid=pid, fd=3, path=path, inode=0, operation="LOCK_EX")
        for pid, path in ((1, "/a"), (2, "/b"))
    ]

    assert {"/a", "/b"} == {record["path"] for record in locks.table((), (), waits, {})}


def test_a_futex_that_is_called_shared_in_memory_of_one_process_is_private():
    heap = "5000-6000 rw-p 00000000 00:00 0 [heap]\n"
    joins = futexes.Waiter(
        pid=1, tid=2, comm="x", address=0x5010, shared=True, operation="wait", limited=False
    )

    assert [] == futexes.groups([futexes.placed(joins, heap)])
    assert [True] == [group["shared"] for group in futexes.groups([futexes.placed(joins, "")])]


def test_a_futex_in_shared_memory_is_one_place_at_two_addresses():
    first = "7f10-7f20 rw-s 00000000 00:1b 164 /dev/shm/sem.x (deleted)\n"
    second = (
        "00400000-00500000 r-xp 00000000 fe:00 9 /bin/x\n8000-8010 rw-s 00000000 00:1b 164 /y\n"
    )

    one, other = futexes.place(first, 0x7F18), futexes.place(second, 0x8008)

    assert one is not None
    assert other is not None
    assert (one.device, one.inode, 8) == (other.device, other.inode, one.offset)
    assert futexes.place(second, 0x400008) is None


# ---------------------------------------------------------------------- connections

A, B = Holder(pid=1, fd=3), Holder(pid=2, fd=4)
PIPE = Connection(
    kind="pipe",
    ends=(End(inode=9, mode="w", holders=(A,)), End(inode=9, mode="r", holders=(B,))),
)


def test_a_reader_waits_for_who_can_write_and_the_pipe_is_empty():
    reading = Waiting(pid=2, tid=2, call=Call(name="read", fds=(4,)), fd=4, inode=9)

    assert [{"pid": 1, "fd": 3}] == edge(reading, PIPE)["for"]
    assert "empty" == fullness(PIPE, [reading])


def test_a_writer_waits_for_who_can_read_and_the_pipe_is_full():
    writing = Waiting(pid=1, tid=1, call=Call(name="write", fds=(3,)), fd=3, inode=9)

    assert [{"pid": 2, "fd": 4}] == edge(writing, PIPE)["for"]
    assert "full" == fullness(PIPE, [writing])
    assert "" == fullness(PIPE, [])


# ---------------------------------------------------------------------- control groups

V1 = {
    "memory.usage_in_bytes": "4096\n",
    "memory.limit_in_bytes": "9223372036854771712\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 3\n",
    "cpu.cfs_quota_us": "150000\n",
    "cpu.cfs_period_us": "100000\n",
    "cpu.stat": "nr_periods 10\nnr_throttled 4\nthrottled_time 9000\n",
    "freezer.state": "FROZEN\n",
    "freezer.self_freezing": "1\n",
    "blkio.throttle.io_service_bytes": "8:0 Read 100\n8:0 Write 5\n8:16 Read 11\nTotal 116\n",
    "pids.max": "max\n",
}
V2 = {
    "memory.current": "4096\n",
    "memory.max": "max\n",
    "memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 3\n",
    "cpu.max": "150000 100000\n",
    "cpu.stat": "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 9\n",
    "cgroup.events": "populated 1\nfrozen 1\n",
    "cgroup.freeze": "1\n",
    "io.stat": "8:0 rbytes=100 wbytes=5 rios=1\n8:16 rbytes=11 wbytes=0\n",
    "pids.max": "max\n",
    "memory.pressure": "some avg10=1.50 avg60=0.00 avg300=0.00 total=12\n"
    "full avg10=0.50 avg60=0.00 avg300=0.00 total=3\n",
}


@pytest.mark.parametrize("files", [V1, V2], ids=["version 1", "version 2"])
def test_both_versions_of_control_groups_are_told_in_one_form(files: dict[str, str]):
    found = cgroups.describe(files)

    assert (4096, None, 3) == tuple(found["memory"][key] for key in ("current", "max", "oom_kill"))
    assert (1.5, 4, 9) == tuple(found["cpu"][key] for key in ("cores", "throttled", "throttled_us"))
    assert {"read_bytes": 111, "written_bytes": 5} == found["io"]
    assert {"frozen": True, "asked": True} == found["freezer"]
    assert {"max": None} == found["pids"]


def test_pressure_is_told_by_what_is_short():
    pressure = cgroups.describe(V2)["pressure"]

    assert (1.5, 0.5) == (pressure["memory"]["some"]["avg10"], pressure["memory"]["full"]["avg10"])
    assert "cpu" not in pressure


def test_a_group_is_named_with_its_version():
    text = "4:memory:/pod/c1\n2:cpu,cpuacct:/pod/c1\n0::/pod:x/c1\n"

    assert [
        (1, ("memory",), "/pod/c1"),
        (1, ("cpu", "cpuacct"), "/pod/c1"),
        (2, (), "/pod:x/c1"),
    ] == cgroups.memberships(text)


# ---------------------------------------------------------------------- mounts

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
90 27 0:50 / /mnt/my\\040weights rw shared:5 - nfs4 filer:/export/models rw,vers=4.2,hard
91 27 0:51 /sub /data rw - fuse.juicefs JuiceFS:cache rw,user_id=0
92 27 0:51 /other /data2 rw - fuse.juicefs JuiceFS:cache rw,user_id=0
93 27 8:1 / / rw - ext4 /dev/sda1 rw
94 27 0:52 / /sys/fs/fuse/connections rw - fusectl fusectl rw
"""


def test_only_file_systems_that_somebody_else_answers_for_are_asked_each_once():
    theirs = tuple(mountinfo.parse(MOUNTS))

    asked, more = mounts.chosen((), {5: theirs, 6: theirs}, "/proc/{pid}/root")

    assert ["/proc/5/root/mnt/my weights", "/proc/5/root/data"] == [each.path for each in asked]
    assert ([[5, 6], [5, 6]], 0) == ([each.processes for each in asked], more)


def test_a_file_system_that_we_see_ourselves_is_asked_where_we_see_it():
    here = mountinfo.Mount(device="0:50", root="/", point="/weights", kind="nfs4")

    (asked, _), _ = mounts.chosen([here], {5: mountinfo.parse(MOUNTS)}, "/proc/{pid}/root")

    assert "/weights" == asked.path


def test_the_server_of_a_file_system_stands_by_itself_for_the_redaction():
    (asked, _), _ = mounts.chosen((), {5: mountinfo.parse(MOUNTS)}, "")

    assert "filer" == mounts.record(asked)["hostname"]


# ---------------------------------------------------------------------- kernel log

LINES = {
    "[ 8123.551090] Memory cgroup out of memory: Killed process 85 (python3) total-vm:9kB": (
        "oom_kill", 85, "python3",
    ),
    "[ 8123.551021] oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid=85,uid=0": (
        "oom", 85, "",
    ),
    "[  120.1] INFO: task ray::Worker:4242 blocked for more than 122 seconds.": (
        "hung_task", 4242, "ray::Worker",
    ),
    "[  120.1] python3[77]: segfault at 8 ip 00007f sp 00007f error 4 in libcuda.so": (
        "crash", 77, "python3",
    ),
    "[  120.1] traps: python3[78] general protection fault ip:7f": ("crash", 78, "python3"),
    "[ 1850.1] NVRM: Xid (PCI:0000:4a:00): 45, pid=40877, name=python3, Ch 0000000a": (
        "gpu", None, "",
    ),
    "[  120.1] nfs: server filer not responding, still trying": ("storage", None, ""),
    "[  120.1] watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:5]": ("lockup", None, ""),
    "[  120.1] mce: [Hardware Error]: Machine check events logged": ("hardware", None, ""),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_kernel_log_that_matters_is_known(line: str):
    (event,) = kernel_log.events([line])

    assert LINES[line] == (event.kind, event.pid, event.name)


def test_a_line_that_matters_is_kept_though_thousands_follow_it():
    kill = "[    1.0] Out of memory: Killed process 85 (python3) total-vm:9kB"
    text = "\n".join((f"<3>{kill}", "<6>[    1.1] usual", *["<6>[    2.0] usual"] * 3000))

    lines = kernel_log.kept(text)

    assert (kill, kernel_log.MAX_LINES + 1) == (lines[0], len(lines))
    assert [1] == [event.line for event in kernel_log.events(lines)]


def test_the_group_of_another_container_is_read_where_that_one_has_it_mounted():
    line = "40 30 0:30 {root} {point} rw - cgroup2 cgroup2 rw"
    ours = tuple(mountinfo.parse(line.format(root="/", point="/sys/fs/cgroup")))
    theirs = tuple(mountinfo.parse(line.format(root="/../c2", point="/sys/fs/cgroup")))

    assert cgroupfs.place(ours, 2, (), "/../c2/worker") is None
    found = cgroupfs.place(theirs, 2, (), "/../c2/worker")
    assert found is not None
    assert "/sys/fs/cgroup/worker" == str(found[0])

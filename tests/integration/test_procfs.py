"""What `/proc` says of real processes."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from processes import eventually, python

from hangwatch.errors import TargetNotFoundError
from hangwatch.model.identity import ProcessId
from hangwatch.system import procfs


def test_our_own_row_says_who_we_are():
    row = procfs.look_closer(procfs.read_row(os.getpid()), procfs.Sockets())

    assert (os.getpid(), os.getppid(), os.geteuid()) == (row.pid, row.ppid, row.uid)
    assert row.title.startswith(sys.orig_argv[0])
    assert row.exe == os.path.realpath(sys.executable)
    assert not row.kernel


def test_every_thread_has_a_row():
    with python("import threading\nfor i in range(3): threading.Thread(target=wait).start()") as it:
        asleep = eventually(lambda: all_asleep(it.pid))

    assert 4 == len(asleep)


def all_asleep(pid):
    """Return all threads, or nothing while one of them runs."""
    threads = tuple(procfs.read_threads(pid))
    return threads if {thread.state for thread in threads} == {"S"} else ()


def test_a_listening_socket_is_found_at_its_own_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        (mine,) = [item for item in procfs.listeners(os.getpid()) if item.port == port]

        assert f"http://127.0.0.1:{port}" == mine.url
        assert procfs.owns(procfs.identify(os.getpid()), mine)
    assert not procfs.owns(procfs.identify(os.getpid()), mine)


def test_a_connection_says_which_address_was_called():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            found = {client.fileno(): f"socket:[{os.fstat(client.fileno()).st_ino}]"}

            assert (f"127.0.0.1:{port}",) == procfs.Sockets().called(os.getpid(), found)
            accepted.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 on this machine")
def test_an_ipv6_address_is_written_with_brackets():
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    with server:
        port = server.getsockname()[1]
        urls = {item.url for item in procfs.listeners(os.getpid())}

    assert f"http://[::1]:{port}" in urls


def test_a_socket_that_listens_everywhere_is_asked_on_loopback():
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        urls = {item.url for item in procfs.listeners(os.getpid())}

    assert f"http://127.0.0.1:{port}" in urls


def test_a_log_that_is_open_for_writing_is_named_and_one_that_is_only_read_is_not(tmp_path):
    written, read = tmp_path / "written.out", tmp_path / "read.out"
    read.touch()
    with python(f"a = open({str(written)!r}, 'w'); b = open({str(read)!r})") as it:
        row = procfs.look_closer(procfs.read_row(it.pid), procfs.Sockets())

    assert str(written) in row.logs
    assert str(read) not in row.logs


def test_a_name_with_blanks_and_parentheses_does_not_confuse_the_fields(tmp_path):
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    try:
        eventually(lambda: procfs.read_row(process.pid).comm == "a) S 1 (b")
        row = procfs.read_row(process.pid)
    finally:
        process.kill()
        process.wait()

    assert os.getpid() == row.ppid


def test_a_pid_that_was_reused_is_not_the_same_process():
    mine = procfs.identify(os.getpid())

    assert procfs.is_same(mine)
    assert not procfs.is_same(ProcessId(mine.pid, mine.start_ticks + 1))


def test_a_pid_that_does_not_exist_cannot_be_identified():
    with pytest.raises(TargetNotFoundError, match="there is no process 4194305"):
        procfs.identify(4194305)


def test_a_thread_of_the_kernel_cannot_be_identified():
    kernel = [row.pid for row in procfs.read_table() if row.kernel]
    if not kernel:
        pytest.skip("no thread of the kernel is visible in this pid namespace")

    with pytest.raises(TargetNotFoundError, match="thread of the kernel"):
        procfs.identify(kernel[0])


def test_a_zombie_keeps_its_row_and_cannot_be_identified():
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        eventually(lambda: procfs.read_row(process.pid).state == "Z")

        with pytest.raises(TargetNotFoundError, match="has ended"):
            procfs.identify(process.pid)
    finally:
        process.wait()


def test_the_signal_that_killed_a_zombie_is_told():
    process = subprocess.Popen(["/bin/sleep", "60"])
    try:
        process.send_signal(signal.SIGKILL)
        eventually(lambda: procfs.read_row(process.pid).state == "Z")

        assert signal.SIGKILL == procfs.read_row(process.pid).exit_signal
    finally:
        process.wait()


def test_a_title_drops_the_empty_arguments_that_a_renamed_program_leaves():
    process = subprocess.Popen(["/bin/sleep", "60"])
    shell = subprocess.Popen(["/bin/sh", "-c", "read x", "ray::Worker", "", "", ""], stdin=-1)
    try:
        eventually(lambda: procfs.read_title(shell.pid).endswith("ray::Worker"))
        titles = procfs.read_title(process.pid), procfs.read_title(shell.pid)
    finally:
        for child in (process, shell):
            child.kill()
            child.wait()
        shell.stdin.close()

    assert ("/bin/sleep 60", "/bin/sh -c read x ray::Worker") == titles


def test_a_link_cannot_lead_out_of_the_root_of_the_target(tmp_path):
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "link").symlink_to("/proc/self/root/etc/passwd")

    assert b"outside" == procfs.read_inside(os.getpid(), tmp_path / "secret", 100)
    with pytest.raises(OSError, match="symbolic"):
        procfs.read_inside(os.getpid(), tmp_path / "link", 100)


def test_a_named_pipe_in_the_root_of_the_target_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(OSError, match="not a regular file"):
        procfs.read_inside(os.getpid(), tmp_path / "pipe", 100)


def test_children_are_found_without_reading_the_whole_table():
    with python("") as it:
        assert it.pid in procfs.children(os.getpid())
    assert it.pid not in procfs.children(os.getpid())

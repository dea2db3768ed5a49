"""Words to a service manager."""

import os
import socket

from hangwatch.system.notify import Notifier


def test_a_service_manager_hears_that_we_are_ready_alive_and_stopping(tmp_path):
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        notifier = Notifier.from_environment({"NOTIFY_SOCKET": address})
        notifier.ready()
        notifier.alive()
        notifier.status("watching\n8 logs")
        notifier.stopping()
        words = [manager.recv(1000) for _ in range(4)]
        notifier.close()

    assert [b"READY=1", b"WATCHDOG=1", b"STATUS=watching 8 logs", b"STOPPING=1"] == words


def test_an_abstract_address_is_understood():
    name = f"hangwatch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        notifier = Notifier("@" + name)
        notifier.ready()

        assert b"READY=1" == manager.recv(100)
        notifier.close()


def test_a_manager_that_is_gone_does_not_disturb(tmp_path):
    notifier = Notifier(str(tmp_path / "nobody"))
    notifier.ready()
    notifier.close()


def test_the_watchdog_interval_counts_only_for_the_process_it_is_meant_for():
    mine = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    other = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}

    assert 30.0 == Notifier.from_environment(mine).watchdog_interval
    assert None is Notifier.from_environment(other).watchdog_interval

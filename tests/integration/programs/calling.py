"""A program whose threads each wait in a system call of their own.

    calling.py FOLDER

Writes ``FOLDER/ready``: the kernel's number of each thread, by what it waits in. Runs under any
Python from 3.10 on.
"""

import fcntl
import json
import os
import select
import socket
import sys
import threading
import time

FOLDER = sys.argv[1]
silent, _kept = os.pipe()
_unread, full = os.pipe()
near, far = socket.socketpair()
listener = socket.create_server(("127.0.0.1", 0))
lock = threading.Lock()
lock.acquire()
file = os.open(f"{FOLDER}/a.lock", os.O_WRONLY | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
other = os.open(f"{FOLDER}/a.lock", os.O_WRONLY)
epoll = select.epoll()
epoll.register(silent)
alive, living = os.pipe()
child = os.fork()
if child == 0:
    os.close(living)
    os.read(alive, 1)  # ends when we do
    os._exit(0)


def fill(write):
    while True:
        write(b"x" * 65536)


WAITS = {
    "read": lambda: os.read(silent, 1),
    "write": lambda: fill(lambda data: os.write(full, data)),
    "recvfrom": lambda: far.recv(1),
    "sendto": lambda: fill(far.send),
    "accept4": listener.accept,
    "epoll_wait": epoll.poll,
    "epoll_wait_limited": lambda: epoll.poll(4000.0),
    "poll": lambda: select.poll().poll(3_000_000),
    "futex": lock.acquire,
    "flock": lambda: fcntl.flock(other, fcntl.LOCK_EX),
    "wait4": lambda: os.waitpid(child, 0),
    "clock_nanosleep": lambda: time.sleep(5000),
}
numbers = {}
lock_of_numbers = threading.Lock()


def wait(name, function):
    with lock_of_numbers:
        numbers[name] = threading.get_native_id()
    function()


for name, function in WAITS.items():
    threading.Thread(target=wait, args=(name, function), daemon=True).start()
while len(numbers) < len(WAITS):
    time.sleep(0.01)
fds = {"read": silent, "write": full, "recvfrom": far.fileno(), "accept4": listener.fileno()}
fds |= {"epoll_wait": epoll.fileno(), "flock": other, "sendto": far.fileno()}
with open(f"{FOLDER}/ready.part", "w") as out:
    json.dump({"threads": numbers, "fds": fds, "child": child}, out)
os.rename(f"{FOLDER}/ready.part", f"{FOLDER}/ready")
threading.Event().wait()

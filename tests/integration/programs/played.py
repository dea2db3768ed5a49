"""Servers that answer as a test says: one process each, whose HTTP is a few sockets and threads.

``played.py FOLDER SPEC…``: each SPEC is a JSON object of path to behaviour. Behaviours:
``{"status": N, "body": TEXT}``; ``{"mute": true}`` accepts and never answers; ``{"drip": true}``
sends a header now and then; ``"key": KEY`` answers 401 without that key. What was asked stands in
``FOLDER/PID.asked``, a line each: path, key, monotonic time. Prints the pids on one line.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time

MUTE = threading.Event()


def answer(peer, spec, asked):
    head = b""
    while b"\r\n\r\n" not in head:
        block = peer.recv(65536)
        if not block:
            return
        head += block
    lines = head.decode().split("\r\n")
    method, path, _ = lines[0].split(" ")
    keys = [line.partition("Bearer ")[2] for line in lines if line.startswith("Authorization: ")]
    asked.write(json.dumps([method, path, "".join(keys), time.monotonic()]) + "\n")
    asked.flush()
    how = spec.get(path, {"status": 404})
    if how.get("mute"):
        MUTE.wait()
    elif how.get("drip"):
        peer.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            time.sleep(0.2)
            peer.sendall(b"x: y\r\n")
    status, body = how.get("status", 200), how.get("body", "").encode()
    if how.get("key", "") not in ("", *keys):
        status, body = 401, b'{"error":"Unauthorized"}'
    elif how.get("echo"):
        body = f"{body.decode()}\n# {keys}".encode()
    peer.sendall(f"HTTP/1.1 {status} so\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def serve(folder, spec, ready):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def one(peer):
        with peer:
            try:
                answer(peer, spec, asked)
            except OSError:
                pass

    with open(f"{folder}/{os.getpid()}.asked", "w") as asked:
        server = socket.create_server(("127.0.0.1", 0), backlog=128)
        os.write(ready, b".")
        while True:
            peer, _ = server.accept()
            threading.Thread(target=one, args=(peer,), daemon=True).start()


def main():
    folder, *specs = sys.argv[1:]
    read, write = os.pipe()
    pids = []
    for spec in specs:
        pid = os.fork()
        if pid == 0:
            serve(folder, json.loads(spec), write)
        pids.append(pid)
    for _ in pids:
        os.read(read, 1)
    print(*pids, flush=True)
    signal.pause()


main()

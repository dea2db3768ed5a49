"""Runs a command for which a volume hears every question and answers none: not even a kill helps.

    deaf.py FOLDER COMMAND…

As ``stalled.py``, but the questions are taken: the kernel waits for the answer to one that was
taken whatever happens to who asked. The server ends with the command, and all who wait with it.
"""

import ctypes
import os
import signal
import struct
import sys

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
PR_SET_PDEATHSIG = 1
FUSE_INIT = 26
folder, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise SystemExit(f"no volume here: {os.strerror(number)}")


check(libc.unshare(CLONE_NEWNS))
check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
server = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other"
check(libc.mount(b"fuse", os.fsencode(folder), b"fuse", 0, options.encode()))
if os.fork() == 0:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while True:
        asked = os.read(server, 1 << 18)
        _, kind, number = struct.unpack_from("=IIQ", asked)
        if kind == FUSE_INIT:
            answer = struct.pack("=IIIIHHII", 7, 31, 4096, 0, 1, 1, 4096, 1) + bytes(36)
            os.write(server, struct.pack("=IiQ", 16 + len(answer), 0, number) + answer)
os.close(server)
os.execvp(command[0], command)

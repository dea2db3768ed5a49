"""Runs a command for which a volume has stalled: whoever opens anything on it waits for ever.

    stalled.py FOLDER COMMAND…

The volume is a FUSE file system that answers nothing, in a mount namespace of the command's own:
nobody else sees it, and it goes with the last process that does. Needs root, and ``/dev/fuse``.
"""

import ctypes
import os
import sys

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
folder, *command = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise SystemExit(f"no volume here: {os.strerror(number)}")


check(libc.unshare(CLONE_NEWNS))
check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
server = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(server, True)  # it stands for who would answer
options = f"fd={server},rootmode=40000,user_id=0,group_id=0,allow_other"
check(libc.mount(b"fuse", os.fsencode(folder), b"fuse", 0, options.encode()))
os.execvp(command[0], command)

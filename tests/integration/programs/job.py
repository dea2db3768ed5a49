"""A shell with one job: runs a program in the foreground of the terminal, as its own session.

``^Z`` stops the job, the next line that is typed continues it. Ends as the job does.
"""

import fcntl
import os
import signal
import subprocess
import sys
import termios

fcntl.ioctl(2, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = subprocess.Popen([sys.executable, *sys.argv[1:]], process_group=0)
os.tcsetpgrp(2, job.pid)
while True:
    _, status = os.waitpid(job.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.tcsetpgrp(2, os.getpgrp())
    os.read(0, 100)
    os.tcsetpgrp(2, job.pid)
    os.kill(job.pid, signal.SIGCONT)

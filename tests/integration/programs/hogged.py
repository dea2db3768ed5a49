"""A thread that holds the GIL for good inside a call in C, and others that want it.

hogged.py OUTPUT
"""

import os
import re
import sys
import threading
import time

OUTPUT = sys.argv[-1]


def hog():
    time.sleep(0.2)
    with open(OUTPUT + ".part", "w") as file:
        file.write("{}")
    os.rename(OUTPUT + ".part", OUTPUT)
    re.match(r"(a+)+$", "a" * 60 + "b")


def want():
    while True:
        time.sleep(0.01)


threading.Thread(target=hog, name="hog", daemon=True).start()
threading.Thread(target=want, name="want", daemon=True).start()
time.sleep(1e6)

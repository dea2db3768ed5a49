"""Which code ran: what was published, what was changed, and no more of it than is asked for."""

import base64
import hashlib
import json
import subprocess

from hangwatch.core import provenance
from hangwatch.core.provenance import Recorded

SOURCE = b"import os\n\ndef step():\n    return os.getpid()\n"
DIGEST = hashlib.sha256(SOURCE).hexdigest()
ENCODED = base64.urlsafe_b64encode(bytes.fromhex(DIGEST)).rstrip(b"=").decode()


def test_a_record_names_each_file_with_hash_and_size():
    text = f'lmdeploy/engine.py,sha256={ENCODED},{len(SOURCE)}\n"a,b.py",,\n../../bin/x,sha256=,1\n'

    assert [
        Recorded(path="lmdeploy/engine.py", digest=DIGEST, size=len(SOURCE)),
        Recorded(path="a,b.py", digest="", size=None),
    ] == list(provenance.record(text))


def test_a_record_that_makes_no_sense_says_nothing():
    assert [] == list(provenance.record("\n\n,,\n/etc/passwd,sha256=,1\n"))
    (known,) = provenance.record("x.py,sha256=~~~,many")
    assert Recorded(path="x.py", digest="", size=None) == known


def test_a_file_differs_when_its_hash_does():
    known = Recorded(path="x.py", digest=DIGEST, size=len(SOURCE))

    assert provenance.differs(known, SOURCE) is False
    assert provenance.differs(known, SOURCE.replace(b"step", b"stop")) is True


def test_without_a_recorded_hash_only_another_size_is_a_difference():
    assert provenance.differs(Recorded(path="x", digest="", size=3), b"abc") is None
    assert provenance.differs(Recorded(path="x", digest="", size=4), b"abc") is True


def test_a_blob_has_the_name_that_git_gives_it(tmp_path):
    (tmp_path / "x.py").write_bytes(SOURCE)
    said = subprocess.run(
        ["git", "hash-object", "--no-filters", str(tmp_path / "x.py")],
        capture_output=True,
        check=True,
    )

    assert said.stdout.decode().strip() == provenance.git_blob(SOURCE)


def test_lines_are_taken_from_stacks_and_from_await_chains():
    threads = json.dumps([{"frames": [{"filename": "/a.py", "line": 3}]}, {"frames": None}])
    tasks = json.dumps({"tasks": [{"chain": [{"file": "/a.py", "line": 9}, {"file": None}]}]})

    assert {"/a.py": {3, 9}} == provenance.places([threads.encode(), tasks.encode(), b"[{", b"7"])


def test_the_package_of_a_file_is_looked_for_from_the_outside():
    assert ("/src/lmdeploy", "/src/lmdeploy/lmdeploy") == provenance.roots(
        "/src/lmdeploy/lmdeploy/pytorch/engine.py"
    )
    assert () == provenance.roots("/home/me/train.py")
    assert () == provenance.roots("/home/me/lmdeploy")


def test_lines_that_touch_are_one_piece_and_lines_that_are_not_there_none():
    text = "\n".join(f"line {number}" for number in range(1, 41))

    found = list(provenance.excerpts("/a.py", text, [2, 7, 30, 99], context=3))

    assert [(1, 10), (27, 7)] == [(piece["first"], len(piece["text"])) for piece in found]
    assert "line 27" == found[1]["text"][0]


def test_libraries_are_told_by_the_names_of_mapped_files():
    maps = """7f00-7f01 r-xp 0 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06
7f01-7f02 r--p 0 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06
7f02-7f03 r-xp 0 08:01 2 /venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2
7f03-7f04 r-xp 0 08:01 3 /venv/torch/lib/libcudart-9335f6a2.so.12
7f04-7f05 r-xp 0 08:01 4 /usr/lib/libc.so.6
"""

    assert {
        "libcuda": ["/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06"],
        "libnccl": ["/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"],
        "libcudart": ["/venv/torch/lib/libcudart-9335f6a2.so.12"],
    } == provenance.libraries(maps)

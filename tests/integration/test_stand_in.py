"""Our reader in the place of py-spy: what it writes is what py-spy would have written."""

import json

import pytest
from captures import run_steps, step_for
from processes import python
from remote_targets import interpreters

pytestmark = pytest.mark.needs_ptrace

STANDING = """
class Deep:
    def go(self, n):
        if n: return self.go(n - 1)
        return [self.end() for _ in range(1)]
    def end(self): (lambda: wait())()
for number in range(3):
    threading.Thread(target=Deep().go, args=(20,), name=f"deep-{number}", daemon=True).start()
def outer():
    def inner():
        ready()
        wait()
    inner()
"""

COMPARED = ("thread_name", "os_thread_id", "active", "owns_gil")


def told(threads):
    """Return what is compared between two samples, and what is concluded from one."""
    return sorted(
        (
            *(thread[key] for key in COMPARED),
            [
                (frame["name"], frame["filename"], frame["module"], frame["line"])
                for frame in thread["frames"]
            ],
        )
        for thread in threads
    )


@pytest.mark.parametrize("interpreter", interpreters(), ids=str)
def test_the_stacks_of_our_reader_are_those_of_py_spy(tmp_path, interpreter):
    with python(STANDING, interpreter=interpreter.command[0], rest="outer()") as it:
        evidence = run_steps(
            tmp_path,
            step_for(it.pid, sample=1),
            step_for(it.pid, sample=2, py_spy="/nonexistent/py-spy"),
        )
        (work,) = tmp_path.glob("*.partial")
        theirs, ours = (
            json.loads((work / each.artifacts[0].path).read_text()) for each in evidence
        )

    assert evidence[0].failure is None
    assert "hangwatch's own reader" == evidence[1].failure.stand_in
    assert told(theirs) == told(ours)
    assert 4 == len(ours)

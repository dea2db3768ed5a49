"""What the reader decides without any process: lines, cycles, groups, text, documents."""

from __future__ import annotations

import dis
import json
import os
import struct
import sys
import types
from pathlib import Path

import pytest

from hangwatch.remote import (
    Awaits,
    Edge,
    Frame,
    Hold,
    Loop,
    Problem,
    Snapshot,
    Task,
    Thread,
    UnknownLayoutError,
    document,
    graph,
    grouping,
    linetable,
    procfs,
    text,
)
from hangwatch.remote.elf import Image, file_symbol, gnu_hash
from hangwatch.remote.errors import ExhaustedError, UnreadableError
from hangwatch.remote.layouts import LAYOUTS
from hangwatch.remote.memory import PAGE, ImageSource, Limits, Memory, ProcessSource
from hangwatch.remote.objects import Objects
from hangwatch.remote.runtime import _bind_debug_offsets


def edge(waiter: int, awaited: int, *, alternative: bool = False) -> Edge:
    return Edge(waiter=waiter, awaited=awaited, kind="task", alternative=alternative)


def test_a_cycle_is_told_in_waiting_order():
    found = graph.waits([edge(3, 1), edge(1, 2), edge(2, 3), edge(4, 1)])

    assert ((1, 2, 3),) == found.cycles
    assert () == found.roots


def test_a_task_that_awaits_itself_is_a_cycle():
    assert ((7,),) == graph.waits([edge(7, 7)]).cycles


def test_what_waits_behind_a_free_task_is_no_deadlock():
    found = graph.waits([edge(1, 2), edge(2, 3)])

    assert () == found.cycles
    assert (3,) == found.roots


def test_one_of_several_holders_may_free_a_semaphore():
    stuck_with = [edge(1, 2, alternative=True), edge(2, 1)]
    way_out = [*stuck_with, edge(1, 3, alternative=True)]

    assert ((1, 2),) == graph.waits(stuck_with).cycles
    assert () == graph.waits(way_out).cycles


def test_roots_with_the_most_behind_them_come_first():
    assert (9, 8) == graph.waits([edge(1, 8), edge(2, 9), edge(3, 2)]).roots


def test_a_crowd_of_cycles_is_found_without_recursion():
    size = 20_000
    found = graph.waits([edge(i, (i + 1) % size) for i in range(size)])

    assert [size] == [len(cycle) for cycle in found.cycles]


def everywhere(code: types.CodeType) -> list[types.CodeType]:
    found = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += everywhere(constant)
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="another table")
def test_lines_are_those_of_pythons_own_decoder():
    source = [linetable.__file__, dis.__file__, json.__file__]
    for path in source:
        module = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
        for code in everywhere(module):
            for start, end, line in code.co_lines():
                for offset in range(start, end, 2):
                    mine = linetable.line_of_locations(
                        code.co_linetable, code.co_firstlineno, offset
                    )

                    assert line == mine


def test_lines_of_the_older_table():
    # Two instructions on line 10, one without a line, then one on line 8.
    table = bytes([4, 0, 2, 0x80, 2, 0xFE])

    assert [10, 10, 10, 8] == [linetable.line_of_pairs(table, 10, at) for at in (0, 2, 4, 6)]


def task(id_: int, name: str, **changes: object) -> Task:
    values: dict[str, object] = {
        "state": "pending",
        "loop": 5,
        "interpreter": 0,
        "chain": (Frame(function="work", file="/srv/app.py", line=3, kind="coroutine"),),
        "awaits": Awaits(kind="event", detail="Event.wait: not set, 1 waiter"),
    }
    return Task(id=id_, name=name, **{**values, **changes})  # type: ignore[arg-type]


def snapshot(*tasks: Task, **changes: object) -> Snapshot:
    loop = Loop(id=5, type="Loop", interpreter=0, thread_id=77, thread_ident=8)
    values: dict[str, object] = {"loops": (loop,), "tasks": tasks}
    return Snapshot(pid=1, python="3.12.1", **{**values, **changes})  # type: ignore[arg-type]


def test_equal_tasks_are_one_group_and_the_odd_one_comes_first():
    odd = task(9, "odd", chain=())
    crowd = [task(i, f"t{i}") for i in range(5)]
    found = grouping.groups(snapshot(*crowd, odd))

    assert [1, 5] == [len(group.tasks) for group in found]


def test_deadlocked_tasks_come_before_all_others():
    waits = graph.waits([edge(1, 2), edge(2, 1)])
    found = grouping.groups(
        snapshot(task(1, "a"), task(2, "b"), task(3, "odd", chain=()), waits=waits)
    )

    assert found[0].deadlocked
    assert ("a", "b") == tuple(each.name for each in found[0].tasks)


def test_motion_tells_what_moved_and_which_loop_ticks():
    before = snapshot(task(1, "a"), task(2, "b"), task(3, "c"))
    after = snapshot(task(1, "a"), task(2, "b", chain=()), task(4, "d"))
    found = grouping.motion(before, after, {77: 10}, {77: 15})

    assert ((2,), (1,), (4,), (3,)) == (found.moved, found.still, found.new, found.gone)
    assert {5: 5} == found.loops
    shown = "\n".join(text.difference(after, found))
    assert "1 moved, 1 did not, 1 new, 1 gone" in shown
    assert "5 wake-ups" in shown


def test_text_escapes_names_and_says_what_is_torn_and_held():
    odd = task(
        1,
        "\x1b]0;x\x07\u202e",
        torn="it moved while it was read",
        holds=(Hold(object=3, type="Lock", certain=False),),
    )
    found = snapshot(odd, problems=(Problem(kind="truncated", where="w\x1b", message="m"),))
    shown = "\n".join([*text.summary(found), *text.grouped(found), *text.problems(found)])

    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "torn: it moved" in shown
    assert "Lock (perhaps)" in shown
    assert "this process is alive" in shown


def test_a_tree_ends_at_a_cycle_and_shows_a_shared_task_once():
    edges = [edge(1, 2), edge(2, 1), edge(3, 4), edge(5, 4)]
    tasks = [task(i, f"t{i}") for i in range(1, 6)]
    shown = "\n".join(text.tree(snapshot(*tasks, waits=graph.waits(edges))))

    assert "(waits for itself: a cycle)" in shown
    assert "'t4' (shown above)" in shown


def test_a_graph_of_nothing_says_so():
    assert "no task waits for another one" in list(text.graph(snapshot(task(1, "a"))))


def test_stacks_are_shown_innermost_first():
    thread = Thread(
        thread_id=7,
        ident=8,
        name="worker",
        interpreter=0,
        frames=(Frame(function="f", file="a.py", line=1),),
        torn="it broke off",
    )

    assert ["", "thread 7 'worker'", "    f  a.py:1", "    torn: it broke off"] == list(
        text.stacks([thread])
    )


def test_the_document_names_the_one_task_that_is_awaited():
    one = task(1, "a", awaits=Awaits(kind="task", detail="a task", tasks=(2,)))
    many = task(3, "c", awaits=Awaits(kind="gather", detail="", tasks=(1, 2)))
    found = document.document(snapshot(one, task(2, "b"), many))

    assert ["b", None, None] == [each["awaits"]["task"] for each in found["tasks"]]
    json.dumps(found)


def test_a_library_file_is_shown_from_its_package_on():
    paths = {
        "/usr/lib/python3/dist-packages/zmq/asyncio.py": "zmq/asyncio.py",
        "/opt/v/lib/python3.11/site-packages/ray/worker.py": "ray/worker.py",
        "/usr/lib/python3.11/asyncio/locks.py": "asyncio/locks.py",
        "/srv/app.py": "/srv/app.py",
    }
    for path, short in paths.items():
        assert short == Frame(function="f", file=path, line=1).short_file


def test_a_symbol_is_hashed_as_the_linker_does():
    # The known value of the specification's reference implementation.
    assert 0x156B2BB8 == gnu_hash("printf")


def image(data: bytes, at: int = 0x10000) -> Memory:
    padded = data + bytes(-len(data) % PAGE)
    pages = {at + i: padded[i : i + PAGE] for i in range(0, len(padded), PAGE)}
    return Memory(ImageSource(pages), Limits(seconds=5, bytes=10 * PAGE))


def test_a_read_may_cross_pages_but_not_holes():
    memory = image(bytes(PAGE - 4) + b"12345678")

    assert b"12345678" == memory.read(0x10000 + PAGE - 4, 8)
    assert struct.unpack("<Q", b"12345678")[0] == memory.word(0x10000 + PAGE - 4)
    with pytest.raises(UnreadableError):
        memory.read(0x10000 + 2 * PAGE - 4, 8)
    with pytest.raises(UnreadableError):
        memory.read(1 << 50, 8)
    with pytest.raises(UnreadableError):
        memory.read(0x10000, -1)


def test_a_budget_of_bytes_ends_a_reading():
    memory = image(bytes(40 * PAGE))

    with pytest.raises(ExhaustedError):
        for page in range(40):
            memory.read(0x10000 + page * PAGE, 8)


def test_a_string_that_never_ends_is_cut():
    assert 300 == len(image(b"x" * PAGE).text(0x10000, 300))


def test_a_free_threaded_build_is_refused_with_a_sentence():
    layout = LAYOUTS[3, 13]
    head = bytearray(1024)
    head[:8] = b"xdebugpy"
    struct.pack_into("<QQ", head, 8, 0x030D00F0, 1)

    with pytest.raises(UnknownLayoutError, match=r"free-threaded build of Python 3\.13"):
        _bind_debug_offsets(image(bytes(head)), 0x10000, layout, [])


def test_offsets_of_another_version_are_refused():
    head = bytearray(1024)
    head[:8] = b"xdebugpy"
    struct.pack_into("<QQ", head, 8, 0x030E00F0, 0)

    with pytest.raises(UnknownLayoutError, match=r"not of 3\.13"):
        _bind_debug_offsets(image(bytes(head)), 0x10000, LAYOUTS[3, 13], [])


def test_a_type_whose_bases_run_in_a_circle_is_read_all_the_same():
    layout = LAYOUTS[3, 12]
    data = bytearray(2 * PAGE)
    where = layout.type
    struct.pack_into("<Q", data, where.name, 0x10000 + PAGE)
    struct.pack_into("<Q", data, where.basic_size, 16)
    struct.pack_into("<Q", data, where.base, 0x10000)
    data[PAGE : PAGE + 5] = b"Loop\0"
    found = Objects(image(bytes(data)), layout).type_at(0x10000)

    assert "Loop" == found.name


def test_every_layout_names_the_sizes_that_prove_it():
    for layout in LAYOUTS.values():
        assert {"coroutine", "dict", "set", "str", "_asyncio.Task"} <= layout.sizes.keys()
        assert layout.sizes["_asyncio.Task"] == layout.task.size
        assert (layout.frame is None) != (layout.frame_object is None)


REFUSALS = {
    "belongs to another user; add SYS_PTRACE": ({"Uid": "1000"}, {"Uid": "0"}, "1", "1", "0"),
    "Yama module": ({"Uid": "1000"}, {"Uid": "1000"}, "1", "1", "1"),
    "undumpable": ({"Uid": "1000"}, {"Uid": "1000"}, "1", "1", "0"),
    "another user namespace": ({"CapEff": "80000"}, {"Uid": "0"}, "1", "2", "0"),
    "seccomp": ({"CapEff": "1ffffffffff"}, {"Uid": "0"}, "1", "1", "0"),
    "not permitted; add SYS_PTRACE": ({"Uid": "1000"}, {}, "1", "1", "0"),
}


@pytest.mark.parametrize("words", REFUSALS)
def test_a_refusal_names_its_reason_and_its_cure(words: str, monkeypatch: pytest.MonkeyPatch):
    ours, theirs, our_space, their_space, scope = REFUSALS[words]
    statuses = {"self": ours, 42: theirs}
    spaces = {"self": our_space, 42: their_space}
    monkeypatch.setattr(procfs, "_status", lambda pid: dict(statuses[pid]))
    monkeypatch.setattr(procfs, "_namespace", lambda pid: spaces[pid])
    monkeypatch.setattr(procfs, "_first_line", lambda _: scope)

    assert words in procfs.explain_refusal(42)


@pytest.mark.skipif(sys.platform != "linux", reason="reads its own memory")
def test_symbols_in_memory_are_those_of_the_file():
    pid = os.getpid()
    memory = Memory(ProcessSource(pid))
    found = 0
    for mapping in procfs.mappings(pid):
        name = mapping.path.rsplit("/", 1)[-1]
        if mapping.offset or not name.startswith(("libpython", "python")):
            continue
        mapped = Image(memory, mapping.start)
        inside, outside = mapped.symbol("_PyRuntime"), file_symbol(Path(mapping.path), "_PyRuntime")
        assert (inside is None) == (outside is None)
        if inside and outside:
            found += 1
            assert inside.address == outside.address + mapped.bias
            assert inside.size == outside.size
            assert mapped.symbol("_PyRuntimeX") is None

    assert found

"""What reports say, and that nothing of the evidence does anything in them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from dossiers import BLOCKED, PARKED, SILENT, WORKING, diagnosed, dump, instance, thread
from task_files import GET, IDLE, LOOP, STUCK, reading, task

from hangwatch import registry
from hangwatch.core import story
from hangwatch.core.codec import to_plain
from hangwatch.core.plain import code, fenced, markdown, printable, table
from hangwatch.core.story import headline
from hangwatch.model.capture import Evidence, Failure, FailureKind, Phase
from hangwatch.model.dossier import Diagnosis
from hangwatch.model.identity import ProcessId
from hangwatch.model.verdict import Confidence, Idle, SuspectedHang
from hangwatch.renderers import terminal

FORMS = ("terminal", "markdown", "issue", "json")

HOSTILE = (
    "\x1b[31mred\x1b]0;title\x07 @maintainer #123 org/repo#4 GH-9 https://evil.example "
    "www.evil.example [click](http://evil) ![pic](http://evil/p.png) "
    "<img src=x onerror=alert(1)> ``` ```` `x` "
    "| cell | **bold** \u202egnp.exe \x9b31m \r\n# heading\n---\n<!-- \u2028 mailto:a@b.c &lt; $x$"
)


def render(diagnosis: Diagnosis, form: str) -> str:
    return registry.renderers()[form].render(diagnosis)


def caught() -> Diagnosis:
    files = {"threads.json": dump(*(thread(pid) for pid in (1, 2, 3)))}
    files["threads2.json"] = files["threads.json"]
    return diagnosed(*(instance(pid) for pid in (1, 2, 3)), files=files)


def suspended() -> Diagnosis:
    """Three engines, each at the same await, with a hundred requests that wait behind it."""
    files = {}
    crowd = [
        task(f"request-{i}", (LOOP, GET), kind="queue", detail="Queue.get: 0 items", number=10 + i)
        for i in range(104)
    ]
    for pid in (11, 12, 13):
        for sample in ("", "2"):
            folder = f"processes/engine-{pid}"
            files[f"{folder}/tasks{sample}.json"] = reading(IDLE, STUCK, *crowd, pid=pid)
            files[f"{folder}/threads{sample}.json"] = dump(thread(pid, PARKED))
    rows = [{"pid": pid, "ppid": pid - 10, "role": "engine"} for pid in (11, 12, 13)]
    files["procs.json"] = json.dumps(rows).encode()
    cause = replace(SILENT, cause="await-never-completes")
    return diagnosed(*(instance(pid, cause) for pid in (1, 2, 3)), files=files)


def counted(pid: int, free: int) -> bytes:
    row = {"id": 1, "task_id": None, "values": {"running": 6, "free blocks": free}}
    table = {"name": "scheduler", "rows": [row], "left_out": 0}
    return reading(STUCK, pid=pid, state=[table, {"name": "empty", "rows": [], "absent": "x"}])


def hostile() -> Diagnosis:
    frames = ((f"/x/{HOSTILE}.py", HOSTILE, 1), *BLOCKED[2:])
    numbers = {"name": HOSTILE, "rows": [{"id": 1, "values": {HOSTILE: HOSTILE}}]}
    hostile_task = task(HOSTILE, frames[:1], kind=HOSTILE, detail=HOSTILE)
    hostile_tasks = reading(hostile_task, pid=1, state=[numbers])
    files = {
        "threads.json": dump(thread(1, frames, thread_name=HOSTILE)),
        "threads2.json": dump(thread(1, frames, thread_name=HOSTILE)),
        "tasks.json": hostile_tasks,
        "tasks2.json": hostile_tasks,
        "procs.json": json.dumps([{"pid": 1, "role": HOSTILE, "title": HOSTILE}]).encode(),
        "health.json": json.dumps({"http": 503, "status": "x", "message": HOSTILE}).encode(),
        "gpu.err": HOSTILE.encode("utf-8"),
        "launch.json": json.dumps({"arguments": HOSTILE}).encode(),
        "versions.json": json.dumps({"packages": {HOSTILE: {"version": HOSTILE}}}).encode(),
    }
    record = instance(1, replace(SILENT, because=(HOSTILE,)), source=HOSTILE)
    record = replace(record, instance=replace(record.instance, tag=HOSTILE))
    return diagnosed(record, files=files, notes=(HOSTILE,), problems=(HOSTILE,))


# --- the first sentence --------------------------------------------------------------------------


def test_the_first_sentence_says_how_many_when_and_with_how_much_work():
    assert (
        "3 of 3 servers stopped answering work within 1 s of each other between "
        "2026-03-04 05:41:40 and 05:41:50 (+00:00), with 24 requests in flight."
    ) == headline(caught())


def test_the_second_sentence_says_what_they_do_now():
    second = " ".join(render(caught(), "terminal").split("\n\n")[0].split()).split(". ", 1)[1]

    assert second.startswith(
        "Now: the event loops of all 3 stopped engines are blocked in the same call, "
        "ray.get in Worker.get_objects (ray/_private/worker.py:967), called from "
    )


@pytest.mark.parametrize("form", ["terminal", "markdown", "issue"])
def test_the_engines_own_numbers_are_told_and_what_moved_of_them(form):
    files = {
        "processes/engine-11/tasks.json": counted(11, 812),
        "processes/engine-11/tasks2.json": counted(11, 790),
        "procs.json": json.dumps([{"pid": 11, "ppid": 1, "role": "engine"}]).encode(),
    }

    text = render(diagnosed(instance(1), files=files), form)

    assert "engine 11, scheduler: running 6, free blocks 812 → 790" in text.replace("\\_", "_")
    assert "empty" not in text


@pytest.mark.parametrize("form", ["terminal", "markdown", "issue"])
def test_the_version_of_python_is_told_with_the_engines(form):
    assert "Python 3.12.1" in render(suspended(), form)


def test_tokens_are_compared_only_where_they_were_read_twice():
    def counted(tokens: int) -> bytes:
        return f"lmdeploy:generation_tokens_total {tokens}.0\n".encode()

    files = {"threads.json": dump(*(thread(pid) for pid in (1, 2, 3)))}
    files["threads2.json"] = files["threads.json"]
    files |= {f"processes/api_server-{pid}/metrics.prom": counted(4000) for pid in (1, 2, 3)}
    files["processes/api_server-2/metrics2.prom"] = counted(4007)

    text = render(diagnosed(*(instance(pid) for pid in (1, 2, 3)), files=files), "terminal")

    assert "tokens between the two samples of 1 of them: 7" in text


def test_a_suspicion_is_told_as_silence_and_no_more():
    doubt = SuspectedHang(
        since=SILENT.since, cause="one-instance-silent", confidence=Confidence.LOW
    )

    assert headline(diagnosed(instance(1, doubt))).startswith("The server fell silent between")


def test_idleness_is_told_without_alarm():
    idle = Idle(
        since=SILENT.since,
        cause="not-a-hang:idle",
        confidence=Confidence.HIGH,
        because=("its last heartbeat had no request in flight",),
    )

    assert (
        "The server is idle since 2026-03-04 05:41:40 (+00:00): "
        "its last heartbeat had no request in flight."
    ) == headline(diagnosed(instance(1, idle)))


def test_working_servers_are_said_to_work():
    assert (
        "2 of 2 servers are working; the last heartbeat came at 2026-03-04 05:41:40 (+00:00)."
    ) == headline(diagnosed(instance(1, WORKING), instance(2, WORKING)))


# --- the six parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["terminal", "markdown", "issue"])
def test_the_parts_stand_in_their_order(form: str):
    text = " ".join(render(caught(), form).split())
    parts = (
        r"3 of 3 servers stopped",
        r"Something that all of them wait for",
        r"Worker\.get_objects",
    )

    places = [re.search(part, text.replace("\\", "")) for part in parts]

    assert None not in places
    starts = [place.start() for place in places if place]
    assert starts[0] == min(starts)


def step(
    name: str, failure: FailureKind | None = None, *, stand_in: str = "", pause_ms: float = 0.0
) -> dict[str, Any]:
    collector, _, pid = name.partition("/")
    left = Evidence(
        step=name,
        collector=collector,
        sample=1,
        phase=Phase.ONSET,
        target=ProcessId(pid=int(pid), start_ticks=7) if pid else None,
        failure=failure and Failure(kind=failure, message="so it was", stand_in=stand_in),
        pause_ms=pause_ms,
    )
    return to_plain(left)


def manifest(*steps: dict[str, Any], notes: tuple[str, ...] = ()) -> dict[str, bytes]:
    whole = {"steps": steps, "capture": {"elapsed_s": 7.2}, "notes": notes}
    return {"manifest.json": json.dumps(whole).encode()}


def test_what_failed_is_told_apart_from_what_was_left_out_or_is_not_here():
    files = manifest(
        step("gpu", FailureKind.NOT_AVAILABLE),
        step("native/1", FailureKind.GATED),
        step("stacks/1", FailureKind.TOOL_FAILED, stand_in="our own reader"),
        step("tasks/1", FailureKind.TIMED_OUT),
        step("tasks/2", FailureKind.TIMED_OUT),
        step("kernel/1"),
        notes=("no Python stacks of 9: no Python there",),
    )

    told = story.tell(diagnosed(instance(1), files=files))

    expected = (
        "tasks (2 times): so it was",
        "stacks: so it was",
        "left out: native: so it was",
        "not here: gpu: so it was",
        "no Python stacks of 9: no Python there",
    )
    assert expected == told.missing
    counted = (
        "in 6 steps in 7.2 s: 2 failed, 1 made up for, 1 left out and 1 found nothing to read."
    )
    assert counted in told.captured


def test_a_report_says_who_stood_still_for_it_and_how_long():
    still = manifest(step("native/1", pause_ms=51.2), step("native/2", pause_ms=39.6))
    running = manifest(step("kernel/1"))

    told = story.tell(diagnosed(instance(1), files=still)).captured
    other = story.tell(diagnosed(instance(1), files=running)).captured

    assert told.endswith("Processes that stood still for it: 1 for 51 ms and 2 for 40 ms.")
    assert other.endswith("No process was seen to stand still for it.")


def test_alike_stacks_are_shown_once():
    assert 1 == render(caught(), "markdown").count("pids 1, 2 and 3")


@pytest.mark.parametrize("form", ["terminal", "markdown", "issue"])
def test_await_chains_stand_before_stacks_equal_ones_counted_and_the_odd_ones_first(form: str):
    text = " ".join(render(suspended(), form).split())
    parts = (
        r"3 . engine pids 11, 12 and 13, task ModelAgentLoop",
        r"Event\.wait .{0,4}asyncio/locks\.py:212.{0,4} ModelAgent\.forward",
        r"312 . engine pids 11, 12 and 13, task request-0, request-1 and 102 more",
        r"EpollSelector\.select",
    )

    places = [re.search(part, text.replace("\\", "")) for part in parts]

    assert None not in places
    starts = [place.start() for place in places if place]
    assert starts == sorted(starts)
    assert "did not move" in text


def test_one_screen_has_the_await_and_every_server():
    page = terminal.page(suspended(), brief=True)

    assert 50 > page.count("\n")
    assert "ModelAgent.forward (lmdeploy/pytorch/engine/model_agent.py:120)" in page
    assert "request-0" not in page
    assert all(re.search(rf"(?m)^ +{pid} +DP0 +hung", page) for pid in (1, 2, 3))


def test_one_screen_has_the_frame_and_every_server():
    page = terminal.page(caught(), brief=True)

    assert 50 > page.count("\n")
    assert "Worker.get_objects (ray/_private/worker.py:967)" in page
    assert all(re.search(rf"(?m)^ +{pid} +DP0 +hung", page) for pid in (1, 2, 3))


def test_colour_is_ours_alone():
    plain, coloured = terminal.page(hostile()), terminal.page(hostile(), colour=True)

    assert plain == re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert "\x1b" not in plain


def test_the_issue_has_the_sections_of_lmdeploys_form():
    headings = re.findall(r"(?m)^### (.*)$", render(caught(), "issue"))

    assert [
        "Checklist",
        "Describe the bug",
        "Reproduction",
        "Environment",
        "Error traceback",
    ] == headings


def test_the_issue_fits_what_github_takes():
    deep = tuple((f"/opt/x/site-packages/m{'y' * 80}.py", "f" * 200, i) for i in range(60))
    threads = [thread(i, (*deep, (f"/x/{i}.py", f"g{i}", 1), *BLOCKED[2:])) for i in range(1, 60)]
    files = {"threads.json": dump(*threads), "threads2.json": dump(*threads)}

    text = render(diagnosed(*(instance(i) for i in range(1, 60)), files=files), "issue")

    assert 65_536 > len(text)
    assert 0 == sum(line.startswith("```") for line in text.split("\n")) % 2


# --- nothing of the evidence does anything -------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_the_evidence_commands_a_terminal(form: str):
    text = render(hostile(), form)

    assert [] == re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028]", text)


@pytest.mark.parametrize("form", ["markdown", "issue"])
def test_nothing_of_the_evidence_becomes_markup(form: str):
    text = render(hostile(), form)
    inline = re.sub(r"(?ms)^(`{3,})\w*$.*?^\1$", "", text)
    inline = re.sub(r"(?<![`\\])(`+)(?!`).+?(?<!`)\1(?!`)", "", inline)

    assert [] == re.findall(r"(?<!\\)!\[|(?<!\\)\]\(", inline)
    assert [] == re.findall(r"[@#](?=[A-Za-z0-9])", inline)
    assert [] == re.findall(r"https?://|www\.\w|mailto:", inline)
    assert [] == re.findall(r"<[a-zA-Z!/]", inline)
    assert [] == re.findall(r"(?m)^# heading|^---$", inline)


@pytest.mark.parametrize("form", ["markdown", "issue"])
def test_nothing_of_the_evidence_ends_a_code_block(form: str):
    text = render(hostile(), form)
    fences = re.findall(r"(?m)^(`{3,})", text)

    assert 0 == len(fences) % 2
    assert all(a == b for a, b in zip(fences[::2], fences[1::2], strict=True))


def test_a_table_keeps_its_columns_whatever_is_in_it():
    rows = render(hostile(), "markdown")
    [line] = [line for line in rows.split("\n") if re.match(r"\| 1 \|", line)]

    assert 6 == len(re.findall(r"(?<!\\)\|", line))


def test_plain_text_is_left_alone():
    assert "/opt/x.py, 3.5 s “well”" == printable("/opt/x.py, 3.5 s “well”")


def test_inline_code_holds_its_backticks():
    assert "`` a`b ``" != code("a`b")
    assert "``a`b``" == code("a`b")
    assert "`` `a ``" == code("`a")


def test_a_code_block_is_longer_than_what_is_in_it():
    assert fenced(["```"]).startswith("````text\n```\n````")


def test_markdown_is_shown_as_written():
    assert r"\*a\* \_b\_ &lt;c&gt;" == markdown("*a* _b_ <c>")
    assert r"Loop.\_get_extra\_" == markdown("Loop._get_extra_")


def test_a_table_aligns_numbers_to_the_right():
    assert ["name   n", "a      5", "b     12"] == table([("name", "n"), ("a", "5"), ("b", "12")])


@pytest.mark.parametrize("text", ["- a", "+ a", "# a", "= a", "1. a", "2) a", "> a", ": a"])
def test_nothing_begins_a_block_of_markdown(text: str):
    assert not re.match(r"[-+#=>:]|\d+[.)]", markdown(text))

"""Whose code a process runs, by the files of its root: published, changed, or a working tree."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from captures import CLOCK, capture, read, request_for
from processes import python

from hangwatch.capture import bundle
from hangwatch.system import procfs

ENGINE = """import threading

SECRET_OF_THE_ENGINE = 'not shown'







def step(ready):
    ready()
    waiting = threading.Event()
    waiting.wait()  # the line of the stack
    return waiting
"""
LINE = ENGINE.splitlines().index("    waiting.wait()  # the line of the stack") + 1
RUN = "import sys; sys.path.insert(0, {folder!r}); import lmdeploy.engine as engine"

pytestmark = pytest.mark.needs_ptrace


def packages(folder):
    return folder / "venv/lib/python{}.{}/site-packages".format(*sys.version_info[:2])


def write(folder, **files):
    """Write a package ``lmdeploy`` into a folder; return its paths."""
    contents = {"__init__.py": "", "engine.py": ENGINE, **files}
    root = folder / "lmdeploy"
    root.mkdir(parents=True)
    for name, text in contents.items():
        (root / name).write_text(text)
    return [root / name for name in contents]


def publish(folder, **files):
    """Install ``lmdeploy`` as a wheel would: with the record of its files."""
    paths = write(folder, **files)
    lines = []
    for path in paths:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest())
        lines.append(
            f"{path.relative_to(folder)},sha256={digest.decode().rstrip('=')},{path.stat().st_size}"
        )
    metadata = folder / "lmdeploy-0.18.0.dist-info"
    metadata.mkdir()
    (metadata / "RECORD").write_text("\n".join(lines))


def captured(tmp_path, folder):
    """Capture a process that runs ``lmdeploy`` from a folder; return what was found by kind."""
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    with python(RUN.format(folder=str(folder)), env=environment, rest="engine.step(ready)") as it:
        outcome, evidence = capture(it.pid, output=tmp_path / "output")
    assert evidence["provenance"].failure is None
    items = json.loads(read(outcome, "environment", "provenance.json"))
    sources = Path(outcome.work, "environment", "sources.json")
    return {
        "pid": it.pid,
        "package": [item for item in items if "recorded_files" in item],
        "file": {Path(item["file"]).name: item for item in items if "file" in item},
        "check": [item for item in items if "differing" in item],
        "sources": json.loads(sources.read_text()) if sources.exists() else None,
    }


def test_a_published_package_is_the_same_file_by_file(tmp_path):
    publish(packages(tmp_path))

    found = captured(tmp_path, packages(tmp_path))

    (package,) = found["package"]
    assert ("lmdeploy", "0.18.0", 2) == (
        package["package"],
        package["version"],
        package["recorded_files"],
    )
    assert [found["pid"]] == package["processes"]
    assert found["file"]["engine.py"]["differs"] is False
    assert (2, [], []) == tuple(
        found["check"][0][name] for name in ("compared", "differing", "missing")
    )


def test_a_file_that_was_patched_by_hand_is_named(tmp_path):
    folder = packages(tmp_path)
    publish(folder, **{"other.py": "x = 1\n", "gone.py": ""})
    (folder / "lmdeploy/engine.py").write_text(ENGINE.replace("return waiting", "return None"))
    (folder / "lmdeploy/other.py").write_text("x = 2\n")
    (folder / "lmdeploy/gone.py").unlink()

    found = captured(tmp_path, folder)

    assert found["file"]["engine.py"]["differs"] is True
    assert ["lmdeploy/engine.py", "lmdeploy/other.py"] == found["check"][0]["differing"]
    assert ["lmdeploy/gone.py"] == found["check"][0]["missing"]


def test_the_lines_that_stand_in_stacks_are_kept_and_no_others(tmp_path):
    publish(packages(tmp_path))

    (piece,) = captured(tmp_path, packages(tmp_path))["sources"]

    assert "    waiting.wait()  # the line of the stack" == piece["text"][LINE - piece["first"]]
    assert 7 >= len(piece["text"])
    assert "SECRET_OF_THE_ENGINE" not in json.dumps(piece)


def test_of_a_working_tree_commit_and_blobs_are_kept_and_no_source(tmp_path):
    source = tmp_path / "lmdeploy"
    write(source)
    for command in (
        ["init", "-q", "."],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x"],
    ):
        subprocess.run(["git", *command], cwd=source, check=True)

    def git(*arguments):
        said = subprocess.run(["git", *arguments], cwd=source, check=True, capture_output=True)
        return said.stdout.decode().strip()

    found = captured(tmp_path, source)

    (package,) = found["package"]
    assert (str(source), git("rev-parse", "HEAD"), 0) == (
        package["folder"],
        package["commit"],
        package["recorded_files"],
    )
    engine = found["file"]["engine.py"]
    assert git("rev-parse", "HEAD:lmdeploy/engine.py") == engine["git_blob"]
    assert engine["differs"] is None
    assert (None, []) == (found["sources"], found["check"])


def test_a_package_installed_in_place_is_one_with_its_working_tree(tmp_path):
    source = tmp_path / "checkout"
    write(source)
    metadata = packages(tmp_path) / "lmdeploy-0.18.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "direct_url.json").write_text(
        json.dumps({"url": f"file://{source}", "dir_info": {"editable": True}})
    )
    (metadata / "RECORD").write_text("__editable___lmdeploy_finder.py,sha256=,1\n")

    found = captured(tmp_path, source)

    (package,) = found["package"]
    assert (True, [found["pid"]]) == (package["editable"], package["processes"])
    assert found["sources"] is None
    assert "git_blob" in found["file"]["engine.py"]


def test_where_no_engine_runs_there_is_nothing_to_compare(tmp_path):
    with python("") as it:
        outcome, evidence = capture(it.pid, output=tmp_path)

    assert evidence["provenance"].failure is None
    assert [] == json.loads(read(outcome, "environment", "provenance.json"))


def test_the_environment_says_who_started_it_where_it_may_run_and_how_it_is_configured(tmp_path):
    arguments = ["serve", "api_server", "/data/Qwen3", "--tp", "8", "--api-keys", "sk-planted-key"]
    with python("", arguments=arguments) as it:
        outcome, _ = capture(it.pid, output=tmp_path)
        folder = f"processes/api_server-{it.pid}"
        launch, limits, configuration = (
            json.loads(read(outcome, folder, name))
            for name in ("launch.json", "limits.json", "engine_config.json")
        )

    assert os.getpid() == launch["parent"]["pid"]
    assert procfs.read_title(os.getpid()) == launch["parent"]["arguments"]
    cpus = limits["allowed"]["cpus"]
    assert {*os.sched_getaffinity(0)} == {
        cpu
        for part in cpus.split(",")
        for cpu in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    }
    assert {"model": {"argument": "Qwen3"}, "tensor_parallel": {"--tp": "8"}} == (
        configuration["settings"]
    )


def test_what_torch_was_built_for_is_read_and_not_executed(tmp_path):
    folder = packages(tmp_path)
    (folder / "torch-2.8.0.dist-info").mkdir(parents=True)
    (folder / "torch").mkdir()
    (folder / "torch/version.py").write_text(
        "from typing import Optional\n__version__ = '2.8.0+cu128'\ndebug = False\n"
        "cuda: Optional[str] = '12.8'\ngit_version = 'abc'\nopen('/x', 'w')\n"
    )
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    with python("", env=environment) as it:
        outcome, _ = capture(it.pid, output=tmp_path / "output")
        versions = json.loads(read(outcome, f"processes/api_server-{it.pid}", "versions.json"))

    assert {"__version__": "2.8.0+cu128", "cuda": "12.8", "git_version": "abc"} == versions["torch"]


PRIVATE = """import threading


def step(ready):
    def sampled():
        threading.Event().wait()

    threading.Thread(target=sampled, name="hf_PlantedPlantedPlantedPlanted", daemon=True).start()
    ready()
    api_key = "sk-planted-planted-planted"
    threading.Event().wait()
    return api_key
"""


def test_nothing_private_of_an_engine_reaches_the_bundle(tmp_path):
    folder = packages(tmp_path)
    publish(folder, **{"engine.py": PRIVATE})
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    arguments = [
        "--dtype",
        "sk-planted-planted-planted",
        "--speculative-config",
        '{"token": "hf_PlantedPlantedPlantedPlanted"}',
    ]
    with python(
        RUN.format(folder=str(folder)),
        env=environment,
        arguments=arguments,
        rest="engine.step(ready)",
    ) as it:
        outcome, _ = capture(it.pid, output=tmp_path / "output", gap=3.0)
        request = request_for(it.pid, output=tmp_path / "output")
        path = bundle.write(outcome, request, clock=CLOCK).path

    with tarfile.open(path) as archive:
        files = {
            member.name.partition("/")[2]: archive.extractfile(member).read()
            for member in archive.getmembers()
        }
    assert [] == [name for name, data in files.items() if b"planted" in data.lower()]
    assert b"threading.Event().wait()" in files["environment/sources.json"]
    assert b"sampled" in files[f"processes/api_server-{it.pid}/samples.txt"]

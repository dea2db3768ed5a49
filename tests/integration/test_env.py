"""``hangwatch env`` as a shell reads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.core.preparation import variables

PYTHON = Path(sys.executable)


def env(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PYTHON), "-m", "hangwatch", "env", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_shell_that_evaluates_it_exports_every_variable_and_has_the_folder(tmp_path):
    folder = tmp_path / "my dumps"
    script = f'eval "$({PYTHON} -m hangwatch env --gpu-core --dir "{folder}")"; exec env -0'

    found = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True)

    exported = dict(entry.split("=", 1) for entry in found.stdout.split("\0") if entry)
    expected = {each.name: each.value for each in variables(str(folder), gpu_core=True)}
    assert expected == {name: exported.get(name) for name in expected}
    assert 0o700 == folder.stat().st_mode & 0o777


def test_what_it_prints_is_data_if_asked(tmp_path):
    found = json.loads(env("--json", "--dir", str(tmp_path)).stdout)

    assert ("hangwatch.env/1", str(tmp_path)) == (found["schema"], found["dir"])
    assert found["variables"][0].keys() == {"name", "value", "gives", "costs"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dir", "dumps"), "give the whole path"),
        (("--k8s", "--json"), "choose one"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(arguments, said):
    found = env(*arguments)

    assert 2 == found.returncode
    assert said in found.stderr

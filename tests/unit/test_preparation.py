"""What an engine's environment must hold, so that it can be asked for dumps."""

from __future__ import annotations

import yaml

from hangwatch.core.preparation import as_kubernetes, as_shell, variables
from hangwatch.core.redaction import ALLOWED_ENVIRONMENT


def test_gpu_core_dumps_are_prepared_by_request_only_for_they_shut_out_a_debugger():
    usual = {each.name for each in variables("/d")}

    assert not [name for name in usual if name.startswith("CUDA")]
    assert "CUDA_ENABLE_USER_TRIGGERED_COREDUMP" in {
        each.name for each in variables("/d", gpu_core=True)
    }


def test_what_each_variable_gives_and_costs_is_said():
    for each in variables("/d", gpu_core=True):
        assert each.gives
        assert each.costs


def test_pipes_and_dumps_lie_in_the_folder():
    placed = [v.value for v in variables("/my/dumps", gpu_core=True) if "/" in v.value]

    assert 4 == len([value for value in placed if value.startswith("/my/dumps/")])


def test_a_container_gets_the_same_as_a_shell():
    found = variables("/tmp", gpu_core=True)

    listed = yaml.safe_load(as_kubernetes(found))

    assert [{"name": each.name, "value": each.value} for each in found] == listed


def test_a_folder_with_blanks_is_quoted():
    assert (
        "mkdir -p -m 700 '/my dumps'"
        == as_shell(variables("/my dumps"), "/my dumps").splitlines()[0]
    )


def test_a_bundle_may_tell_that_an_engine_was_prepared():
    assert [] == [
        v.name for v in variables("/d", gpu_core=True) if not ALLOWED_ENVIRONMENT.match(v.name)
    ]

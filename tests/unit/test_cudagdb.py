"""What cuda-gdb prints, as it printed it on an H200 (13.0, driver 580)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.core.cudagdb import QUESTIONS, kernels, refusal, tidy
from hangwatch.model.capture import FailureKind

PRINTED = Path(__file__).parents[1] / "fixtures" / "gpu"
SPIN = (PRINTED / "cuda_gdb-spin.txt").read_text()
TORCH = (PRINTED / "cuda_gdb-torch.txt").read_text()


def test_a_kernel_is_named_with_its_line_of_source():
    assert [
        {
            "kernel": 0,
            "device": 0,
            "grid": 1545,
            "status": "active",
            "grid_dim": "(1,1,1)",
            "block_dim": "(32,1,1)",
            "name": "hangwatch_lab_spin",
            "file": "/opt/hangwatch/lab/gpu_kernel.py",
            "line": 62,
        }
    ] == kernels(SPIN)


def test_a_kernel_that_was_compiled_without_lines_has_its_name_alone():
    (kernel,) = kernels(TORCH)

    assert "at::cuda::(anonymous namespace)::spin_kernel" == kernel["name"]
    assert "file" not in kernel


def test_what_it_says_again_for_kernels_that_are_not_there_is_left_out():
    tidied = tidy(SPIN)

    assert 1 == tidied.count("#0 ")
    assert tidied.endswith("[Inferior 1 (process 574) detached]\n")
    assert kernels(SPIN) == kernels(tidied)


def test_a_second_kernel_has_a_line_of_its_own():
    second = (
        "hangwatch: kernel 1\n"
        "[Switching focus to CUDA kernel 1, grid 7, block (0,0,0), thread (0,0,0), device 1, sm 0, "
        "warp 0, lane 0]\n"
        "#0  reduce<<<(8,1,1),(256,1,1)>>> (n=5) at /srv/reduce.cu:12\n"
    )

    found = kernels(tidy(SPIN.replace("hangwatch: kernel 1\n", second, 1)))

    assert [("hangwatch_lab_spin", 62), ("reduce", 12)] == [(k["name"], k["line"]) for k in found]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "fatal:  CUDA coredump is not supported with late attach. Disabling coredump.",
            FailureKind.NOT_AVAILABLE,
        ),
        ("ptrace: Operation not permitted.", FailureKind.NOT_PERMITTED),
        ("Timed out waiting for the CUDA API to initialize.", FailureKind.NOT_AVAILABLE),
    ],
)
def test_why_it_has_nothing_to_say_is_told(said: str, kind: FailureKind):
    reason = refusal(said)

    assert reason is not None
    assert kind == reason[0]


def test_nothing_is_found_in_nonsense():
    assert ([], "", None) == (kernels("\x00" * 99), tidy(""), refusal("all is well"))


def test_no_question_changes_anything():
    allowed = ("info cuda ", "bt ", "x/", "cuda kernel ", "echo ")

    assert [] == [question for question in QUESTIONS if not question.startswith(allowed)]

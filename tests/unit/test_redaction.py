"""What must not leave the machine is taken out; what a reader compares stays comparable."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.core.redaction import Redactor, WithheldError

# Each line is kept in pieces: no file of this repository holds anything of the form of a key.
PLANTED = [
    (entry["what"], "".join(entry["line"]), "".join(entry["secret"]), entry["log_only"])
    for entry in json.loads(
        Path(__file__).parents[1].joinpath("fixtures", "planted-secrets.json").read_text("utf-8")
    )
]
BEAT = (
    b"[2026-03-04 13:44:49 DP0] Avg thr (in/out): 25113.4 / 1893.0 tokens/s, "
    b"Server (succeeded/failed/routed/waiting): 4123 / 6 / 31 / 0, "
    b"Engine (running/waiting): 29 / 2, KV cache: 71.3%, "
)
KEY = b"of a test"


@pytest.mark.parametrize(
    ("line", "secret"), [(p[1], p[2]) for p in PLANTED], ids=[p[0] for p in PLANTED]
)
def test_no_planted_secret_is_left_in_a_log(line: str, secret: str):
    redactor = Redactor(KEY)
    redactor.learn(line.encode())

    assert secret not in redactor.text(line.encode(), log=True).decode()


@pytest.mark.parametrize(
    ("line", "secret"),
    [(p[1], p[2]) for p in PLANTED if not p[3]],
    ids=[p[0] for p in PLANTED if not p[3]],
)
def test_no_planted_secret_is_left_in_a_json_string(line: str, secret: str):
    redactor = Redactor(KEY)
    data = json.dumps({"note": line}).encode()
    redactor.learn(data)

    kept = redactor.file("x/notes.json", data)

    assert secret not in json.loads(kept)["note"]


def test_a_heartbeat_stays_as_it_is():
    assert BEAT == Redactor(KEY).text(BEAT, log=True)


@pytest.mark.parametrize(
    "line",
    [
        "Backend health probe timed out after 10.0s.",
        "PyTorch engine loop task has stopped: ['MainLoopWaitExecutor'].",
        "0, NVIDIA H200, 0 %, 0 %, 121034 MiB, 143771 MiB, 78.30 W, 700.00 W, 345 MHz, 0, P0",
        "[ 1850.100112] NVRM: Xid (PCI:0000:4a:00): 45, pid=40877, name=python3, Ch 0000000a",
        'lmdeploy:generation_tokens_total{engine="0",model_name="m"} 881231.0',
        "nvidia-cublas-cu12==12.9.1.4 libcublas.so.12.9.1.4 driver: 580.65.6.1",
        "worker-00a1b2c3d4e5f60718293a4b5c6d7e8f9001122334455667788-02000000-71000.out",
        "ray::core::CoreWorker::HandleLocalGC a::b() std::move",
        "HINT:    Please open http://0.0.0.0:23333 in a browser",
        "https://github.com/InternLM/lmdeploy/issues/4883 git@github.com:org/repo.git",
        "max_new_tokens=512 eos_token_id=2 token: None",
    ],
)
def test_what_an_analysis_needs_stays(line: str):
    assert line == Redactor(KEY).text(line.encode()).decode()


def test_a_prompt_takes_the_lines_it_runs_over():
    log = b"prompt='first\nsecond line\nthird'\n" + BEAT

    kept = Redactor(KEY).text(log, log=True)

    assert b"second" not in kept
    assert b"third" not in kept
    assert kept.endswith(BEAT)


def test_the_addresses_of_hardware_that_a_firewall_logs_are_taken_out():
    line = "[    9.1] DROP IN=eth0 MAC=0a:1b:2c:3d:4e:5f:66:77:88:99:aa:bb:08:00 SRC=10.1.2.3"

    kept = Redactor(KEY).text(line.encode(), log=True).decode()

    assert "3d:4e" not in kept
    assert "10.1.2.3" not in kept
    assert kept.startswith("[    9.1] DROP IN=eth0 MAC=mac-")


def test_the_same_host_has_the_same_name_in_every_file_and_bundle():
    one, other = Redactor(KEY), Redactor(KEY)

    assert one.string("from 10.1.2.3") == other.string("from 10.1.2.3")


def test_another_key_gives_other_names():
    assert Redactor(b"a").string("10.1.2.3") != Redactor(b"b").string("10.1.2.3")


def test_without_a_key_names_are_numbered():
    assert "address-1, address-2, address-1" == Redactor().string("10.0.0.1, 10.0.0.2, 10.0.0.1")


def test_a_host_name_said_in_one_file_is_known_in_the_others():
    redactor = Redactor(KEY)
    redactor.learn(b'{"hostname": "bigiron"}')

    assert b"bigiron" not in redactor.text(b"raylet on bigiron started")


@pytest.mark.parametrize(
    "line",
    [
        b"[ 12.5] nfs: server bigiron not responding, still trying",
        b"[ 12.5] nfs: server bigiron OK",
        b"[ 2.25] systemd[1]: Hostname set to <bigiron>.",
    ],
)
def test_a_host_name_that_the_kernel_log_says_is_known_in_all_files(line):
    redactor = Redactor(KEY)
    redactor.learn(line)

    assert b"bigiron" not in redactor.text(line + b"\nraylet on bigiron started")


def test_a_machine_that_bears_a_common_word_does_not_garble_the_evidence():
    redactor = Redactor(KEY, hosts=["engine", "running"])

    assert BEAT == redactor.text(BEAT, log=True)


def test_the_environment_is_an_allow_list():
    kept = Redactor(KEY).environment(
        {"NCCL_DEBUG": "INFO", "MY_THING": "1", "LMDEPLOY_API_KEY": "x", "PATH": "/usr/bin"}
    )

    assert {"NCCL_DEBUG": "INFO", "PATH": "/usr/bin"} == kept


def test_an_environment_file_keeps_allowed_names_only():
    data = json.dumps({"FOO": "plain words", "TZ": "Etc/UTC"}).encode()

    kept = Redactor(KEY).file("processes/engine-7/environ.json", data)

    assert {"TZ": "Etc/UTC"} == json.loads(kept)


def test_redacted_json_is_json():
    data = json.dumps({"token": "a'b\"c", "cmd": ["--api-key", 'k"1', "x"]}).encode()

    json.loads(Redactor(KEY).file("procs.json", data))


@pytest.mark.parametrize("name", ["core.4242", "dump.bin", "weights.pt", "environ.json"])
def test_what_cannot_be_read_is_withheld(name: str):
    with pytest.raises(WithheldError):
        Redactor(KEY).file(f"processes/engine-1/{name}", b"\x00\x01")


def test_what_was_taken_out_is_counted():
    redactor = Redactor(KEY)

    redactor.text(b"password=hunter22 at 10.0.0.1 and 10.0.0.2")

    assert {"secret": 1, "address": 2} == dict(redactor.counts)


@given(st.lists(st.sampled_from([entry[1] for entry in PLANTED] + ["", "x", "\r", "\x00"])))
def test_the_number_of_lines_never_changes(lines: list[str]):
    data = "\n".join(lines).encode()

    assert data.count(b"\n") == Redactor(KEY).text(data, log=True).count(b"\n")


@given(st.binary(max_size=300))
def test_any_bytes_can_be_redacted(data: bytes):
    assert data.count(b"\n") == Redactor(KEY).text(data, log=True).count(b"\n")


def test_a_secret_that_is_known_is_masked_whatever_its_form():
    redactor = Redactor(secrets=("plain-words-for-a-key", 'q"uo\\te', "abc"))
    encoded = base64.b64encode(b"x:plain-words-for-a-key").decode()
    text = f"see plain-words-for-a-key, {encoded}; abc, but not abcd"
    document = json.dumps({"said": 'q"uo\\te'}).encode()

    assert "see [redacted], [redacted]; [redacted], but not abcd" == redactor.string(text)
    assert {"said": "[redacted]"} == json.loads(redactor.file("health.json", document))


def test_a_gpu_is_the_same_one_throughout_and_nobody_knows_which():
    text = (
        Redactor(KEY)
        .text(
            b"    GPU UUID      : GPU-01234567-89ab-cdef-0123-456789abcdef\n"
            b"NVIDIA_VISIBLE_DEVICES=GPU-01234567-89ab-cdef-0123-456789abcdef\n"
            b"    Serial Number : 1650000000000\n"
            b"    Chassis Serial Number : N/A\n"
        )
        .decode()
    )

    first, second, serial, absent = text.splitlines()
    assert first.split()[-1] == second.partition("=")[2] != "GPU-01234567"
    assert "89ab-cdef" not in text
    assert "1650000000000" not in serial
    assert absent.endswith(": N/A")

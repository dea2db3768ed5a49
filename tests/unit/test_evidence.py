"""Evidence from disk, which may come from a stranger."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from hangwatch.errors import NotABundleError
from hangwatch.system import evidence

MINIMUM = {"manifest.json": b"{}", "incident.json": b"{}"}


def pack(path: Path, files: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for info in others:
            archive.addfile(info)
    return path


def test_a_bundle_is_read_without_its_top_folder(tmp_path: Path):
    packed = pack(tmp_path / "b.tar.gz", {f"top/{k}": v for k, v in MINIMUM.items()})

    found = evidence.read([packed])

    assert found.is_bundle
    assert MINIMUM == found.files


def test_a_folder_gives_its_files_and_where_its_logs_are(tmp_path: Path):
    (tmp_path / "log.txt").write_bytes(b"x" * 10)
    (tmp_path / "procs.json").write_bytes(b"[]")

    found = evidence.read([tmp_path])

    assert {"procs.json": b"[]"} == found.files
    assert {"procs.json": 2, "log.txt": 10} == found.sizes
    assert (tmp_path,) == found.logs


def test_a_link_in_a_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.json").write_bytes(b"[1]")
    (tmp_path / "in" / "procs.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "in" / "health.json").write_bytes(b"{}")

    assert {"health.json": b"{}"} == evidence.read([tmp_path / "in"]).files


@pytest.mark.parametrize("name", ["../out.json", "/etc/x.json", "a/../../b.json"])
def test_a_name_that_leads_out_of_the_archive_is_refused(tmp_path: Path, name: str):
    packed = pack(tmp_path / "b.tar.gz", {**MINIMUM, name: b"[]"})

    found = evidence.read([packed])

    assert MINIMUM == found.files
    assert found.problems


def test_a_link_in_an_archive_is_refused(tmp_path: Path):
    link = tarfile.TarInfo("procs.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"

    found = evidence.read([pack(tmp_path / "b.tar.gz", MINIMUM, link)])

    assert MINIMUM == found.files


def test_a_file_that_unpacks_to_too_much_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evidence, "MAX_FILE", 1000)
    packed = pack(tmp_path / "b.tar.gz", {**MINIMUM, "procs.json": b" " * 5000})

    found = evidence.read([packed])

    assert "procs.json" not in found.files
    assert ("procs.json is larger than 1000 bytes and was not read",) == found.problems


def test_a_bundle_that_was_cut_short_is_said_to_be(tmp_path: Path):
    whole = pack(tmp_path / "b.tar.gz", {**MINIMUM, "x.json": os.urandom(9000)})
    whole.write_bytes(whole.read_bytes()[:4000])

    with pytest.raises(NotABundleError, match="cut short"):
        evidence.read([whole])


def test_something_else_with_the_name_of_a_bundle_is_refused(tmp_path: Path):
    other = tmp_path / "b.tar.gz"
    other.write_bytes(b"hello")

    with pytest.raises(NotABundleError, match="damaged") as refused:
        evidence.read([other])

    assert "\n" not in str(refused.value)


def test_a_foreign_archive_is_refused(tmp_path: Path):
    with pytest.raises(NotABundleError, match="no hangwatch bundle"):
        evidence.read([pack(tmp_path / "b.tgz", {"a.txt": b"a"})])


def test_a_path_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(NotABundleError, match="does not exist"):
        evidence.read([tmp_path / "nothing"])


def test_an_empty_folder_is_no_evidence(tmp_path: Path):
    with pytest.raises(NotABundleError, match="neither a bundle nor loose evidence"):
        evidence.read([tmp_path])


def test_single_files_are_read_by_their_names(tmp_path: Path):
    (tmp_path / "health.json").write_bytes(b"{}")
    (tmp_path / "server.out").write_bytes(b"line")

    found = evidence.read([tmp_path / "health.json", tmp_path / "server.out"])

    assert {"health.json": b"{}"} == found.files
    assert (tmp_path / "server.out",) == found.logs

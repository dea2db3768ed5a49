"""The state directory."""

import json
import os
import stat

import pytest

from hangwatch.daemon.state import StateDirectory, ensure_key
from hangwatch.errors import ConfigError, StateLockedError


def test_a_second_daemon_on_the_same_directory_is_refused(tmp_path):
    with StateDirectory(tmp_path), pytest.raises(StateLockedError, match=r"\(pid \d+\) uses"):
        StateDirectory(tmp_path)


def test_a_directory_that_was_left_can_be_used_again(tmp_path):
    StateDirectory(tmp_path).close()

    with StateDirectory(tmp_path) as state:
        assert tmp_path == state.path


def test_what_was_saved_is_loaded_by_the_next_one(tmp_path):
    with StateDirectory(tmp_path) as state:
        state.save("offsets", {"/a.log": [1, 2]})
    with StateDirectory(tmp_path) as state:
        assert {"/a.log": [1, 2]} == state.load("offsets")


def test_a_file_that_was_cut_short_counts_as_absent(tmp_path):
    (tmp_path / "offsets.json").write_text('{"/a.log": [1,')

    with StateDirectory(tmp_path) as state:
        assert {} == state.load("offsets")


def test_the_index_of_bundles_survives_a_torn_line(tmp_path):
    with StateDirectory(tmp_path) as state:
        state.add_bundle({"path": "a.tar.gz"})
        with (tmp_path / "bundles.jsonl").open("a") as file:
            file.write('{"path": "b\n')
        state.add_bundle({"path": "c.tar.gz"})

        assert ["a.tar.gz", "c.tar.gz"] == [record["path"] for record in state.bundles()]


def test_the_directory_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "format").write_text("hangwatch-state 99\n")

    with pytest.raises(ConfigError, match="another version"):
        StateDirectory(tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="--state"):
        StateDirectory(tmp_path / "file" / "state")


def test_only_the_owner_can_read_what_is_kept(tmp_path):
    with StateDirectory(tmp_path / "state") as state:
        state.save("memory", {})
        state.add_bundle({})
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "state").iterdir()}

    assert {0o600} == modes
    assert 0o700 == stat.S_IMODE((tmp_path / "state").stat().st_mode)


def test_saved_files_are_plain_json(tmp_path):
    with StateDirectory(tmp_path) as state:
        state.save("memory", {"a": 1})

    assert {"a": 1} == json.loads((tmp_path / "memory.json").read_text())


def test_the_key_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    first = ensure_key(tmp_path / "state")

    assert 32 == len(first)
    assert first == ensure_key(tmp_path / "state")
    assert first == ensure_key(tmp_path / "state", b"another")
    assert 0o600 == stat.S_IMODE((tmp_path / "state/pseudonym.key").stat().st_mode)


def test_a_key_can_be_shared(tmp_path):
    assert ensure_key(tmp_path / "a") == ensure_key(tmp_path / "b", ensure_key(tmp_path / "a"))


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("lock", StateDirectory),
        (".format.new", StateDirectory),
        ("shadow.jsonl", lambda path: StateDirectory(path).add_withheld({})),
        ("bundles.jsonl", lambda path: StateDirectory(path).add_bundle({})),
        (".memory.json.new", lambda path: StateDirectory(path).save("memory", {})),
        (".pseudonym.key.{pid}", ensure_key),
    ],
)
def test_no_link_leads_what_is_written_elsewhere(tmp_path, name, use):
    (tmp_path / "theirs").write_text("of somebody else")
    state = tmp_path / "state"
    state.mkdir()
    (state / name.format(pid=os.getpid())).symlink_to(tmp_path / "theirs")

    with pytest.raises((OSError, ConfigError)):
        use(state)

    assert "of somebody else" == (tmp_path / "theirs").read_text()

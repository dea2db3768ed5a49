"""Settings: layers, origins, and errors that help."""

import re
from pathlib import Path

import pytest

from hangwatch.daemon.settings import Settings, default_state, defined, resolve
from hangwatch.errors import ConfigError
from hangwatch.model.policy import Policy


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "hangwatch.toml"
    file.write_text(text)
    return file


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve({}, file=write(tmp_path, text), environment={})
    return str(caught.value).replace(str(tmp_path), "")


def test_without_any_layer_the_policy_is_the_default_one_and_calibrates_itself():
    assert Policy(calibrate=True) == resolve({}, environment={}).settings.policy()


def test_a_limit_that_somebody_set_is_not_calibrated_unless_asked_for():
    fixed = resolve({"stall_after": 90}, environment={}).settings.policy()
    asked = resolve({"stall_after": 90, "calibrate": True}, environment={}).settings.policy()

    assert (False, True) == (fixed.calibrate, asked.calibrate)


def test_each_layer_overrides_the_one_before_and_is_remembered(tmp_path):
    file = write(tmp_path, "# limits\nstall_after = 60\ncool_down = 1\nmissed_beats = 4\n")
    environment = {"HANGWATCH_COOL_DOWN": "2", "HANGWATCH_MISSED_BEATS": "5"}

    resolved = resolve({"missed_beats": 6}, file=file, environment=environment)

    policy = resolved.settings.policy()
    assert (60.0, 2.0, 6) == (policy.stall_after, policy.cool_down, policy.missed_beats)
    assert f"{file}:2" == resolved.origins["stall_after"]
    assert "HANGWATCH_COOL_DOWN" == resolved.origins["cool_down"]
    assert "--missed-beats" == resolved.origins["missed_beats"]
    assert "default" == resolved.origins["together"]


def test_rows_have_plain_values_with_their_origins(tmp_path):
    rows = resolve({"output": str(tmp_path)}, environment={}).as_rows()

    assert {"value": str(tmp_path), "origin": "--output"} == rows["output"]


def test_flags_that_were_not_given_override_nothing(tmp_path):
    file = write(tmp_path, 'log = ["a.log"]\nstall_after = 7\n')

    resolved = resolve({"log": (), "stall_after": None}, file=file, environment={})

    assert (("a.log",), 7.0) == (resolved.settings.log, resolved.settings.stall_after)


def test_bundles_go_below_the_state_directory_unless_told_otherwise():
    settings = resolve({"state": "/srv/state"}, environment={}).settings

    assert Path("/srv/state/bundles") == settings.output


def test_the_state_directory_is_the_one_of_systemd_else_of_xdg():
    assert Path("/var/lib/a") == default_state({"STATE_DIRECTORY": "/var/lib/a:/var/lib/b"})
    assert Path("/x/hangwatch") == default_state({"XDG_STATE_HOME": "/x"})
    assert Path.home() / ".local/state/hangwatch" == default_state({})


def test_several_logs_in_the_environment_are_separated_like_a_path():
    settings = resolve({}, environment={"HANGWATCH_LOG": "/a/*.out:/b.log"}).settings

    assert ("/a/*.out", "/b.log") == settings.log


def test_an_unknown_key_is_an_error_that_names_its_line_and_the_nearest_known_one(tmp_path):
    message = complaint(tmp_path, "\n\nstal_after = 3\n")

    assert "/hangwatch.toml:3: unknown setting 'stal_after'; did you mean stall_after?" == message


def test_a_key_that_resembles_none_is_answered_with_all_of_them(tmp_path):
    message = complaint(tmp_path, "zzz = 1\n")

    assert all(name in message for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('stall_after = "soon"', 'takes a number of seconds greater than 0, not "soon"'),
        ('stall_after = "3"', 'takes a number of seconds greater than 0, not "3"'),
        ("stall_after = true", "takes a number of seconds greater than 0, not true"),
        ("stall_after = -1", "takes a number of seconds greater than 0, not -1"),
        ("stall_after = inf", "takes a number of seconds greater than 0, not Infinity"),
        ("missed_beats = 2.5", "takes a whole number from 1 on, not 2.5"),
        ('log = "a.log"', 'takes a list of paths or patterns of logs to follow, not "a.log"'),
        ("output = 3", "takes a folder for bundles, not 3"),
        ('log_format = "xml"', 'takes "auto", "console" or "json", not "xml"'),
    ],
)
def test_a_wrong_type_is_an_error_that_says_what_is_taken(tmp_path, line, expected):
    message = complaint(tmp_path, line)

    key = line.split(" ")[0]
    assert f"/hangwatch.toml:1: {key} {expected}" == message


def test_a_collector_that_does_not_exist_is_an_error_with_its_line(tmp_path):
    message = complaint(tmp_path, "\n[collectors.stack]\npy_spy = '/opt/py-spy'\n")

    assert "/hangwatch.toml:2: there is no collector 'stack'; did you mean stacks?" == message


def test_a_setting_that_a_collector_does_not_have_is_an_error_with_its_line(tmp_path):
    message = complaint(tmp_path, "[collectors.stacks]\npyspy = '/opt/py-spy'\n")

    assert "/hangwatch.toml:2: stacks has no setting 'pyspy'; did you mean py_spy?" == message


def test_settings_of_collectors_may_be_numbers_and_truths(tmp_path):
    file = tmp_path / "hangwatch.toml"
    file.write_text("[collectors.native]\nbudget_ms = 20\ninside_root = true\n")

    resolved = resolve({}, file=file, environment={})

    expected = {"native": {"budget_ms": "20", "inside_root": "yes"}}
    assert expected == resolved.settings.collectors


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('budget_ms = "x"', 'takes a number greater than 0, not "x"'),
        ("budget_ms = -1", 'takes a number greater than 0, not "-1"'),
        ("budget_ms = 0", 'takes a number greater than 0, not "0"'),
        ("budget_ms = nan", 'takes a number greater than 0, not "nan"'),
        ('inside_root = "true"', 'takes "yes" or "no", not "true"'),
    ],
)
def test_a_setting_that_a_collector_could_not_use_is_an_error_at_the_start(
    tmp_path, line, expected
):
    message = complaint(tmp_path, f"[collectors.native]\n{line}\n")

    assert f"/hangwatch.toml:2: {line.split(' ')[0]} {expected}" == message


def test_only_a_collector_that_runs_by_request_can_be_requested():
    with pytest.raises(ConfigError, match=r"^--collect: no collector 'kernel' runs by request; "):
        resolve({"collect": ("kernel",)}, environment={})


def test_a_file_that_is_not_toml_is_an_error_with_its_place(tmp_path):
    message = complaint(tmp_path, "a = = 1\n")

    assert "/hangwatch.toml: not valid TOML: Invalid value (at line 1, column 5)" == message


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*No such file"):
        resolve({}, file=tmp_path / "nope.toml", environment={})


def test_a_misspelt_variable_is_an_error():
    with pytest.raises(ConfigError, match="did you mean HANGWATCH_STALL_AFTER"):
        resolve({}, environment={"HANGWATCH_STAL_AFTER": "3"})


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone():
    resolved = resolve({}, environment={"HANGWATCH_SERVICE_HOST": "198.51.100.7"})

    assert () == resolved.changed_from_default


def test_a_wrong_flag_is_an_error_that_names_the_flag():
    with pytest.raises(ConfigError, match=r"^--stall-after: stall_after takes"):
        resolve({"stall_after": -2.0}, environment={})


PROFILE = """\
stall_after = 60

[profiles.mytool]
heartbeat = 'steps: (?P<running>\\d+)'
interval = 5

[profiles.mytool.endpoints]
health = "/healthz"
"""


def test_a_profile_of_the_file_is_one_of_those_that_there_are(tmp_path):
    file = tmp_path / "hw.toml"
    file.write_text(PROFILE)

    settings = resolve({}, file=file, environment={}).settings

    assert ["mytool"] == [profile.name for profile in settings.defined()]
    assert settings.defined() == defined(file)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("<running>", "<runing>", 4, "profiles.mytool.heartbeat: unknown group"),
        ("/healthz", "/terminate", 8, "profiles.mytool.endpoints.health"),
        ("interval = 5", "intervall = 5", 5, "did you mean interval?"),
        ("heartbeat", "heart", 4, "did you mean heartbeat?"),
        ("profiles.mytool", "profiles.vllm", 3, "'vllm' is taken"),
    ],
)
def test_a_mistake_in_a_profile_is_told_with_its_line(tmp_path, old, new, line, words):
    file = tmp_path / "hw.toml"
    file.write_text(PROFILE.replace(old, new))

    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        resolve({}, file=file, environment={})

    assert str(caught.value).startswith(f"{file}:{line}: ")


def test_profiles_that_are_no_table_are_refused(tmp_path):
    file = tmp_path / "hw.toml"
    file.write_text("profiles = 3\n")

    with pytest.raises(ConfigError, match="profiles takes a table"):
        resolve({}, file=file, environment={})

"""Settings: defaults yield to a TOML file, the file to ``HANGWATCH_*``, those to flags.

One name a setting everywhere: ``stall_after`` in the file, ``HANGWATCH_STALL_AFTER`` in the
environment, ``--stall-after`` on the command line. Each resolved setting remembers where it came
from, and the bundle records it. In the file types are strict; the other two are text by nature.

An environment variable that resembles no setting is left alone: Kubernetes itself sets
``HANGWATCH_PORT`` and its like for a Service of that name.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hangwatch import registry
from hangwatch.core.baseline import CROWDED
from hangwatch.core.definition import DefinitionError, define
from hangwatch.errors import ConfigError
from hangwatch.model.policy import Policy
from hangwatch.model.profile import EngineProfile
from hangwatch.system.leasing import default_state

PREFIX: Final = "HANGWATCH_"

Seconds = Annotated[
    float, Field(gt=0, allow_inf_nan=False, title="a number of seconds greater than 0")
]

_DEFAULT: Final = Policy()

_LISTS: Final = ("log", "collect", "aftermath")
"""Settings that hold several values; a variable separates them with ``:``."""

_NUMBERS: Final = ("_ms", "timeout", "deadline")
"""How settings of collectors end that are numbers."""


class Settings(BaseModel):
    """All that can be set, resolved.

    Attributes mirror the keys of the file; durations are in seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    log: tuple[str, ...] = Field((), title="a list of paths or patterns of logs to follow")
    """Paths, globs or folders; ``-`` is standard input. Empty: look for Ray sessions."""
    output: Path = Field(Path(), title="a folder for bundles")
    """Where bundles go; by default ``bundles`` in the state directory."""
    state: Path = Field(Path(), title="a folder for the daemon's own state")
    """By default ``$STATE_DIRECTORY``, else ``hangwatch`` in the XDG state home."""
    profile: str = Field("auto", min_length=1, title='"auto" or the name of an engine profile')
    """The only engine to look for; ``auto`` looks for all that are known."""
    profiles: Mapping[str, Any] = Field(
        default_factory=dict, title="a table of engine profiles, [profiles.NAME]"
    )
    """Engines that have no profile of ours, by name: see ``core.definition``."""
    heartbeat_interval: Annotated[
        float | None, Field(gt=0, allow_inf_nan=False, title="a number of seconds greater than 0")
    ] = None
    """Time between beats; by default the profile's."""
    stall_after: Seconds = _DEFAULT.stall_after
    """Silence that is suspicious while nothing excludes a long prefill."""
    missed_beats: Annotated[int, Field(ge=1, title="a whole number from 1 on")] = (
        _DEFAULT.missed_beats
    )
    """Intervals of silence that suffice where a witness excludes a long prefill."""
    together: Seconds = _DEFAULT.together
    """Intervals within which instances fall silent *together*."""
    child_silence: Seconds = _DEFAULT.child_silence
    """Silence of a child of ours that makes its instances ``blind``."""
    loop_gap: Seconds = _DEFAULT.loop_gap
    """Pause of our own loop that does not count as listening."""
    cool_down: Seconds = _DEFAULT.cool_down
    """Time after a capture in which the same instances start no new one."""
    poll_interval: Seconds = _DEFAULT.poll_interval
    """Time between two looks of the loop."""
    probe_interval: Annotated[
        float, Field(ge=1, allow_inf_nan=False, title="a number of seconds from 1 on")
    ] = _DEFAULT.probe_interval
    """Time between two requests at one endpoint of a server, captures aside."""
    sample_gap: Seconds = _DEFAULT.sample_gap
    """Pause between the two samples of a capture."""
    api_key_file: Path | None = Field(None, title="a file with API keys, one a line")
    """API keys that the servers ask for; the keys themselves are written nowhere."""
    calibrate: Annotated[bool, Field(title="true or false")] = True
    """Whether ``stall_after`` follows the gaps observed; by default only where it is not set."""
    pause_limit: Seconds = _DEFAULT.pause_limit
    """A sleep that lasts longer is suspicious itself."""
    lease_limit: Seconds = _DEFAULT.lease_limit
    """The longest lease that is granted."""
    lease_file: Path | None = Field(None, title="a path")
    """A file that announces pauses when it is written: ``20m``."""
    starved_after: Seconds = _DEFAULT.starved_after
    """Time without work in the whole fleet that is worth a notice, while a job runs."""
    job_running: Annotated[bool, Field(title="true or false")] = _DEFAULT.job_running
    """Whether a job is known to run that should bring work; a driver that is seen is enough."""
    aftermath: tuple[Seconds, ...] = Field(
        _DEFAULT.aftermath, title="a list of numbers of seconds greater than 0"
    )
    """How long after a bundle its processes are looked at again; a last look is at the end."""
    collect: tuple[str, ...] = Field((), title="a list of collectors that run only by request")
    """Collectors that an incident's capture runs besides, each at a price: see the safety page."""
    collectors: Mapping[str, Mapping[str, str]] = Field(
        default_factory=dict, title="a table of settings of collectors, [collectors.NAME]"
    )
    """Settings of collectors, by name."""
    baseline_interval: Annotated[
        float, Field(ge=0, allow_inf_nan=False, title="a number of seconds, 0 for never")
    ] = 600.0
    """Time between two looks at processes that are well; 0 for none."""
    baseline_load: Annotated[
        float, Field(gt=0, allow_inf_nan=False, title="a number greater than 0")
    ] = CROWDED
    """Threads that want to run, for each core, above which no such look is taken."""
    run_bundle: Annotated[bool, Field(title="true or false")] = True
    """Whether the end of ``watch`` writes a bundle of the run, where nothing is wrong."""
    observe_only: Annotated[bool, Field(title="true or false")] = False
    """Whether incidents are only reported: nothing is captured."""
    listen: str = Field("", title="an address and port: 127.0.0.1:9464")
    """Where our own ``/metrics`` and ``/healthz`` answer; by default nowhere."""
    grace: Seconds = 25.0
    """Time after SIGTERM in which a running capture may finish its bundle."""
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", title='"auto", "console" or "json"'
    )
    """Form of our own log on standard error."""

    def defined(self) -> tuple[EngineProfile, ...]:
        """Return the profiles that are defined here; they were checked."""
        return tuple(define(name, table) for name, table in self.profiles.items())

    def policy(self) -> Policy:
        """Return the limits among them."""
        return Policy(**{field.name: getattr(self, field.name) for field in fields(Policy)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings and where each came from.

    Attributes:
        settings: The values.
        origins: Key to ``default``, ``FILE:LINE``, a variable's name or a flag.
    """

    settings: Settings
    origins: Mapping[str, str]

    @property
    def changed_from_default(self) -> tuple[str, ...]:
        """The keys that somebody set."""
        return tuple(key for key, origin in self.origins.items() if origin != "default")

    def as_rows(self) -> dict[str, dict[str, Any]]:
        """Return ``{key: {"value": …, "origin": …}}``, plain, as the manifest has it."""
        plain = self.settings.model_dump(mode="json")
        return {key: {"value": plain[key], "origin": self.origins[key]} for key in plain}


def resolve(
    flags: Mapping[str, Any],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Return the settings after every layer had its say.

    Args:
        flags: Values from the command line by key; ``None`` and ``()`` mean not given.
        file: The TOML file, if any.
        environment: Variables; by default our own.

    Raises:
        ConfigError: An unknown key, a wrong type or an impossible value, with its place.
    """
    variables = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origins = dict.fromkeys(Settings.model_fields, "default")
    for key, value, origin in (
        *_of_file(file),
        *_of_environment(variables),
        *_of_flags(flags),
    ):
        if key == "collect":
            _check_collect(value, origin)
        values[key] = value
        origins[key] = origin
    values.setdefault("state", default_state(variables))
    values.setdefault("output", values["state"] / "bundles")
    values.setdefault("calibrate", origins["stall_after"] == "default")
    return Resolved(settings=Settings(**values), origins=origins)


def _of_file(file: Path | None) -> Iterator[tuple[str, Any, str]]:
    if file is None:
        return
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8; a configuration is a TOML file") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration {file}: {error.strerror}; check --config"
        ) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    for key, value in table.items():
        place = f"{file}:{_line_of(key, text)}"
        if key not in Settings.model_fields:
            raise ConfigError(f"{place}: unknown setting {key!r}; {_nearest(key)}")
        if key == "profiles":
            _check_profiles(value, file, text)
        given = _as_text(value) if key == "collectors" else value
        checked = _checked(key, given, place, strict=True)
        if key == "collectors":
            _check_collectors(checked, file, text)
        yield key, checked, place


def defined(file: Path | None) -> tuple[EngineProfile, ...]:
    """Return the profiles that a configuration file defines; the rest of it must be right, too.

    Raises:
        ConfigError: The file cannot be read, or holds what is no setting.
    """
    found = {key: value for key, value, _ in _of_file(file)}
    return tuple(define(name, table) for name, table in found.get("profiles", {}).items())


def _check_profiles(tables: Any, file: Path, text: str) -> None:
    if not isinstance(tables, Mapping):
        return  # the type of the setting tells
    for name, table in tables.items():
        try:
            define(name, table, taken=registry.profiles())
        except DefinitionError as error:
            keys = ("profiles", name, *error.keys)
            place = f"{file}:{_line_of_keys(keys, text)}"
            raise ConfigError(f"{place}: {'.'.join(keys)}: {error}") from error


def _check_collectors(tables: Mapping[str, Mapping[str, str]], file: Path, text: str) -> None:
    known = registry.collectors()
    for name, table in tables.items():
        place = f"{file}:{_line_of_keys(('collectors', name), text)}"
        if name not in known:
            raise ConfigError(f"{place}: there is no collector {name!r}; {_closest(name, known)}")
        for option, value in table.items():
            place = f"{file}:{_line_of_keys(('collectors', name, option), text)}"
            if option not in known[name].options:
                raise ConfigError(
                    f"{place}: {name} has no setting {option!r}; "
                    f"{_closest(option, known[name].options)}"
                )
            if takes := _refused(option, known[name].options[option], value):
                raise ConfigError(f"{place}: {option} takes {takes}, not {_quoted(value)}")


def _as_text(tables: Any) -> Any:
    """Return settings of collectors as the texts that they are handed on as.

    A file may have numbers and truths as TOML writes them.
    """
    if not isinstance(tables, Mapping):
        return tables  # the type of the setting tells
    return {
        name: {option: _text(value) for option, value in table.items()}
        if isinstance(table, Mapping)
        else table
        for name, table in tables.items()
    }


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int | float) else value


def _refused(option: str, meaning: str, value: str) -> str:
    """Return what a setting of a collector takes, if *value* is not that, else ``""``."""
    if meaning.startswith("yes:") and value not in ("yes", "no"):
        return '"yes" or "no"'
    if option.endswith(_NUMBERS) and not _is_positive(value):
        return "a number greater than 0"
    return ""


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _check_collect(names: Iterable[str], origin: str) -> None:
    known = [name for name, each in registry.collectors().items() if each.opt_in]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{origin}: no collector {name!r} runs by request; {_closest(name, known)}"
            )


def _closest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known) or '(none)'}"


def _line_of_keys(keys: Sequence[str], text: str) -> int:
    """Return the line that sets the last of *keys*, or the nearest one that tells of it."""
    lines = text.splitlines()
    at = found = 0
    for depth in range(len(keys), 0, -1):
        header = re.compile(rf"\s*\[\s*{_dotted(keys[:depth])}\s*\]")
        at = next((n for n, line in enumerate(lines, 1) if header.match(line)), 0)
        if at:
            break
    for n in range(at, len(lines)):
        if n >= at and re.match(r"\s*\[", lines[n]):
            break
        if re.match(rf"\s*(?:[\w.\"'-]+\.)?[\"']?{re.escape(keys[-1])}[\"']?\s*=", lines[n]):
            found = n + 1
            break
    return found or at or 1


def _dotted(keys: Sequence[str]) -> str:
    return r"\s*\.\s*".join(rf"[\"']?{re.escape(key)}[\"']?" for key in keys)


def _line_of(key: str, text: str) -> int:
    """Return the line that sets *key*; tomllib keeps no places."""
    pattern = re.compile(rf"""\s*(?:\[+\s*)?["']?{re.escape(key)}["']?\s*[=\].]""")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.match(line):
            return number
    return 1


def _of_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for name in sorted(variables):
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in Settings.model_fields:
            text = variables[name]
            value = list(filter(None, text.split(os.pathsep))) if key in _LISTS else text
            yield key, _checked(key, value, name), name
        elif difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.8):
            raise ConfigError(f"unknown variable {name}; {_nearest(key, PREFIX, str.upper)}")


def _of_flags(flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for key, value in flags.items():
        if value is None or value == ():
            continue
        flag = "--" + key.replace("_", "-")
        yield key, _checked(key, value, flag), flag


def _nearest(key: str, prefix: str = "", spell: Any = str) -> str:
    known = list(Settings.model_fields)
    close = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{spell(close[0])}?"
    return "the settings are " + ", ".join(f"{prefix}{spell(name)}" for name in known)


def _checked(key: str, value: Any, origin: str, *, strict: bool = False) -> Any:
    """Return *value* as the type of *key*.

    Raises:
        ConfigError: It cannot be one.
    """
    try:
        if strict:
            # Through JSON, where strictness still lets a list be a tuple and text be a path.
            text = json.dumps({key: value}, default=str)
            return getattr(Settings.model_validate_json(text, strict=True), key)
        return getattr(Settings.model_validate({key: value}), key)
    except ValidationError as error:
        takes = Settings.model_fields[key].title or "another type"
        raise ConfigError(f"{origin}: {key} takes {takes}, not {_quoted(value)}") from error


def _quoted(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."

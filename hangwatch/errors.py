"""The errors that a user can mend, each one sentence with its remedy."""

from __future__ import annotations


class HangwatchError(Exception):
    """Something the caller can put right; the message says what and how."""

    exit_code = 1


class UsageError(HangwatchError):
    """The command line asks for something that cannot be."""

    exit_code = 2


class ConfigError(HangwatchError):
    """A setting has an unknown name, a wrong type or an impossible value."""

    exit_code = 2


class TargetNotFoundError(HangwatchError):
    """There is no such process, or it is not one that can be watched."""


class NotABundleError(HangwatchError):
    """The path is neither a bundle, nor an unpacked one, nor loose evidence."""


class OutputError(HangwatchError):
    """The bundle cannot be written where it should go."""


class StateLockedError(HangwatchError):
    """Another daemon already uses this state directory."""


class LeaseError(HangwatchError):
    """An announced pause was not taken, or not given back."""


class ListenError(HangwatchError):
    """Our own endpoint cannot listen where it should."""

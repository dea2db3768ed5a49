"""Why another process cannot be read: each error one sentence with its remedy."""

from __future__ import annotations


class RemoteError(Exception):
    """The process as a whole cannot be read; the message says why and what helps."""


class ProcessGoneError(RemoteError):
    """There is no such process, or it ended, or its number belongs to another one now."""


class NotPermittedError(RemoteError):
    """The kernel forbids reading the process's memory."""


class NotPythonError(RemoteError):
    """There is no CPython in the process, or it has not started yet or has already ended."""


class UnknownLayoutError(RemoteError):
    """It is a CPython whose structures are not known here; nothing is guessed."""


class UnreadableError(Exception):
    """One read cannot be right: unmapped, null, absurd.

    It spoils the object that was being read, never the whole result. Caught inside this package
    and turned into a ``Problem``.
    """


class ExhaustedError(UnreadableError):
    """Nothing more can be read now; what was read by then stands.

    A limit on time or bytes was reached, or the process ended or forbade itself meanwhile.
    """

"""Errors that UserKV raises on purpose; every message is one sentence that says what to change."""


class UserKVError(Exception):
    """Base of all errors of this package. The command line prints it as one line and exits with 2."""


class InvalidUserRequestError(UserKVError, ValueError):
    """The user part of a request (``kv_transfer_params``) is wrong. HTTP 400, or a ``ValueError`` offline."""


class InvalidSettingError(UserKVError, ValueError):
    """A setting (environment variable or option) has a value that cannot be used."""


class InvalidOptionError(InvalidSettingError):
    """The value of one option cannot be used.

    Attributes:
        option: its name, with which the message begins.
        problem: the rest of the message.

    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(option, problem)
        self.option = option
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.option} {self.problem}"

    def renamed(self, option: str) -> "InvalidOptionError":
        """The same, with the name under which the option was given."""
        return InvalidOptionError(option, self.problem)


class UnsupportedEngineError(UserKVError, ValueError):
    """The engine is configured in a way that the user-granular cache cannot serve; start-up fails."""


class InvalidInputFileError(UserKVError, ValueError):
    """A workload or data file has a malformed line; the message names file and line number."""


class IntegrityError(UserKVError, AssertionError):
    """An invariant of a data structure does not hold. Raised by ``check_integrity()`` only."""

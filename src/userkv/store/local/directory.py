"""The directory of the SSD tier belongs to one engine at a time; the lock that says so dies with its owner."""

import fcntl
import os
from pathlib import Path

from userkv.core.errors import InvalidOptionError

LOCK_FILE = "userkv.lock"


class DirectoryLock:
    """The right to use a directory, which is made if it does not exist.

    Raises:
        InvalidSettingError: another engine uses it, or it cannot be used.

    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK | os.X_OK):
                raise InvalidOptionError(
                    "local_dir",
                    f"{str(directory)!r} cannot be written to: name one that this user may write to",
                )
            self._descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidOptionError(
                "local_dir",
                f"{str(directory)!r} cannot be used ({error.strerror}): name one that exists, or can be made",
            ) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise InvalidOptionError(
                    "local_dir", f"{str(directory)!r} is in use by another engine: give each engine its own"
                ) from error
            raise InvalidOptionError(
                "local_dir", f"{str(directory)!r} cannot be locked ({error.strerror}): name one on a local file system"
            ) from error

    def release(self) -> None:
        """Let others use the directory."""
        os.close(self._descriptor)


def check_directory(path: Path) -> None:
    """Find out before an engine starts whether it could use ``path``.

    Raises:
        InvalidSettingError: it could not; the message says what to change.

    """
    DirectoryLock(path).release()

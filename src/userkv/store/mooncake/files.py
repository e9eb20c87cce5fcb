"""The directory where Mooncake keeps objects that left the memory of this process: one process at a time."""

import fcntl
from pathlib import Path

from userkv.core.errors import InvalidOptionError

LOCK_NAME = "userkv.lock"
_IN_USE = "in use\n"


class FilesDirectory:
    """Keeps others out of a directory until it is closed or this process ends.

    Args:
        path: the directory; made if need be.

    Attributes:
        left_tidy: whether the last one who used it closed it.

    Raises:
        InvalidOptionError: it cannot be used, or somebody uses it.

    """

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (path / LOCK_NAME).open("a+")
        except OSError as error:
            raise InvalidOptionError("ssd_offload_path", f"{path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InvalidOptionError(
                "ssd_offload_path", f"{path} is in use; every process needs a directory of its own"
            ) from error
        self._lock.seek(0)
        self.left_tidy = not self._lock.read()
        self._write(_IN_USE)

    def close(self, tidy: bool) -> None:
        """Let others in.

        Args:
            tidy: whether the master knows that the files are no longer served.

        """
        if tidy:
            self._write("")
        self._lock.close()

    def _write(self, text: str) -> None:
        self._lock.truncate(0)
        self._lock.write(text)
        self._lock.flush()

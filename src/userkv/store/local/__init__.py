"""The embedded backend, the default: host memory and a directory of this machine."""

from userkv.store.local.backend import LocalBackend
from userkv.store.local.directory import check_directory

__all__ = ["LocalBackend", "check_directory"]

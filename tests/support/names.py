"""Names of users whose hashes are the same in each process, for tests of policies that look at hashes."""

from zlib import crc32


class StableName(str):
    """A text that hashes alike whatever ``PYTHONHASHSEED`` is."""

    __slots__ = ()

    def __hash__(self) -> int:
        return crc32(self.encode()) | crc32(self[::-1].encode(), 1) << 28

    __eq__ = str.__eq__

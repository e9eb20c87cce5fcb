"""What lies before an extent's bytes in its object, so that a reader knows whether they are what he wants.

::

    offset  bytes
         0      4  magic "UKVX"
         4      4  version, 2
         8     16  blake2b of the key
        24      8  bytes of the payload
        32      8  checksum of the payload (``store/checksum.py``)
        40     16  zero
        56      8  XXH3 of the 56 bytes before

Numbers are unsigned and little-endian. 64 bytes, so that the payload is aligned as the object is.
"""

import hashlib
import struct

import xxhash

SIZE = 64
_MAGIC = b"UKVX"
_VERSION = 2
_BODY = struct.Struct("<4sI16sQQ16x")
_CHECKSUM = struct.Struct("<Q")


def pack(key: str, nbytes: int, checksum: int) -> bytes:
    """The header of an extent with ``nbytes`` bytes of payload."""
    body = _BODY.pack(_MAGIC, _VERSION, _digest(key), nbytes, checksum)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def fault(data: bytes, key: str, nbytes: int, checksum: int) -> str:
    """What is wrong with an extent that was read, "" if nothing is.

    Args:
        data: the header that was read.
        key: whose extent it should be.
        nbytes: bytes of payload that were read.
        checksum: of these bytes.

    """
    if data == pack(key, nbytes, checksum):
        return ""
    body = data[: _BODY.size]
    if data[_BODY.size :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
        return "its header is damaged"
    magic, version, digest, size, _ = _BODY.unpack(body)
    if (magic, version) != (_MAGIC, _VERSION):
        return "it was written by another version"
    if digest != _digest(key):
        return "it belongs to another key"
    return f"it has {size} bytes instead of {nbytes}" if size != nbytes else "its checksum differs"


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()

"""Sizes in bytes, as people write and read them. This is the only parser of sizes in UserKV.

A size is a number of bytes or text. ``KB``, ``MB``, ``GB`` and ``TB`` are powers of 1000: ``"1GB"`` is 10**9 bytes.
``KiB``, ``MiB``, ``GiB`` and ``TiB`` are powers of 1024, and so are ``k``, ``m``, ``g`` and ``t`` alone: ``"1GiB"`` and
``"1g"`` are 2**30 bytes. Case does not matter.
"""

import re
from typing import Any

from userkv.core.errors import InvalidOptionError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) *(?:([kmgt])(i?)(b?)|b)?")


def parse_size(name: str, value: Any) -> int:
    """A number of bytes from an integer or text.

    Args:
        name: the option that has the value, for the error message.
        value: an integer of 0 or more, or text such as ``"4GiB"``. Fractions of a byte are dropped.

    Raises:
        InvalidOptionError: the value is not a size.

    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if match is None:
        raise InvalidOptionError(name, f'must be a size such as "4GiB" or a number of bytes, not {value!r}')
    number, prefix, binary, byte = match.groups()
    step = 1000 if byte and not binary else 1024
    return int(float(number) * step ** (" kmgt".index(prefix) if prefix else 0))


def format_size(nbytes: int) -> str:
    """A size for people, such as ``"1.5 GiB"``: in the largest binary unit of which there is at least one.

    Four digits are kept. :func:`parse_size` reads the text back.
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"

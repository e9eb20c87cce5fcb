"""The namespace of KV: two engines may exchange KV exactly if these texts are equal.

``{model}#{weights version}#{fingerprint}``: the version changes with the weights, the fingerprint with everything else
that changes KV's bytes or meaning: model configuration, data types, block size, memory layout, how heads are split, and
on CPUs the instruction set, for which the bytes are packed.
"""

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from userkv.core.errors import InvalidSettingError
from userkv.core.request import UserKey

_SAMPLE = 4096
_FORMAT = 1
"""Of what is stored per block; a number that changes makes older KV unreadable."""


def fingerprint(facts: Any) -> str:
    """A short digest of facts that JSON can hold."""
    text = json.dumps([_FORMAT, facts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def weights_fingerprint(model: str) -> str:
    """A digest of a model's weights: of sizes, headers, and a sample of each tensor's bytes.

    Training changes every tensor, so samples tell versions apart without reading all of it.

    Raises:
        InvalidSettingError: the weights are not in a directory here, so only the operator can name their version.

    """
    files = sorted(
        path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in Path(model).glob(pattern) if path.is_file()
    )
    if not files:
        raise InvalidSettingError(
            f"the weights of {model} cannot be told apart, since there are no weight files in such a directory; "
            "name their version with weights_version in kv_connector_extra_config"
        )
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.name.encode())
        for piece in _samples(path):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        starts = list(range(0, size, max(size // 64, _SAMPLE)))
        if path.suffix == ".safetensors" and size > 8:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(min(length, size - 8))
            yield header
            starts += [8 + length + start for start in _tensor_starts(header)]
        for start in starts:
            file.seek(start)
            yield file.read(_SAMPLE)


def _tensor_starts(header: bytes) -> Iterable[int]:
    tensors = json.loads(header)
    return [entry["data_offsets"][0] for name, entry in sorted(tensors.items()) if name != "__metadata__"]


class Namespaces:
    """The namespace of each user's KV, as of now. Scheduler thread only.

    Args:
        model: name of the model.
        version: of its weights.
        facts: see :func:`fingerprint`.

    """

    def __init__(self, model: str, version: str, facts: Any) -> None:
        self.version = version
        self._model = model
        self._fingerprint = fingerprint(facts)
        self._announced = ""
        self._adapters: dict[int, tuple[float, str]] = {}

    def of(self, key: UserKey, adapter_id: int) -> str:
        """The namespace of KV that is computed for ``key`` now; "" if an adapter's weights cannot be told apart.

        Args:
            key: the user, and his adapter.
            adapter_id: vLLM's number of the adapter, a new one each time it is loaded by name; 0 without one.

        """
        base = f"{self._model}#{self.version}#{self._fingerprint}"
        if not key.lora_name:
            return base
        adapter = self._adapter(adapter_id, key.lora_path)
        return f"{base}#{adapter}" if adapter else ""

    def announce(self, version: str) -> None:
        """The next :meth:`renew` is to new weights of this version."""
        self._announced = version

    def renew(self) -> None:
        """The weights have changed. If nobody has announced a version, share nothing that was, and with nobody."""
        self.version = self._announced or f"{self.version.split('~')[0]}~{uuid.uuid4().hex[:16]}"
        self._announced = ""
        self._adapters.clear()

    def _adapter(self, adapter_id: int, path: str) -> str:
        """Digest of an adapter's weights as they were when it was first seen under this number.

        If the files have changed since, nobody knows which of them the engine has loaded.
        """
        try:
            newest = max(entry.stat().st_mtime for entry in os.scandir(path))
            if adapter_id not in self._adapters:
                self._adapters[adapter_id] = (newest, weights_fingerprint(path))
        except (OSError, ValueError, InvalidSettingError):
            return ""
        seen, digest = self._adapters[adapter_id]
        return digest if seen == newest else ""

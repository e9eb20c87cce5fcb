"""The namespace of KV: two engines may exchange KV exactly if their namespaces are equal.

A namespace is ``{model}#{weights version}#{fingerprint}[#{adapter}]``, each part percent-encoded. The version changes
with the weights. The fingerprint changes with everything else that changes the bytes or the meaning of KV: the model's
configuration, data types, block size, memory layout, how heads are split, the code of UserKV's own models, and on CPUs
the instruction set, for which the bytes are packed.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash

from userkv.core.errors import InvalidSettingError
from userkv.core.request import UserKey

_CHUNK = 8 << 20
_FORMAT = 1
"""Version of the bytes stored per block. Another number makes older KV unreadable."""


def fingerprint(facts: Any) -> str:
    """A short digest of ``facts``, which JSON must be able to hold."""
    text = json.dumps([_FORMAT, facts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def code_fingerprint(files: Iterable[Path]) -> str:
    """A digest of the code of UserKV's own models, which may change what KV means without any other sign of it.

    A changed comment counts, too; that costs each user one miss.
    """
    state = xxhash.xxh3_64()
    for path in sorted(files):
        state.update(f"{path.parent.name}/{path.name}\0".encode() + path.read_bytes() + b"\0")
    return state.hexdigest()


def weight_files(model: str) -> list[Path]:
    """The files with a model's or an adapter's weights.

    Raises:
        InvalidSettingError: there are none, so only the operator can name the version of the weights.

    """
    files = sorted(path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in Path(model).glob(pattern))
    if not files:
        raise InvalidSettingError(
            f"the version of the weights of {model} is unknown, since there are no weight files in such a directory; "
            "name their version with weights_version in kv_connector_extra_config"
        )
    return files


def weights_fingerprint(model: str) -> str:
    """A digest of all bytes of a model's weights, at the speed of reading them (gigabytes per second).

    Samples would be cheaper, but a daily refresh may change no more than some rows of an embedding.

    Raises:
        InvalidSettingError: see :func:`weight_files`.
        OSError: a file cannot be read.

    """
    state = xxhash.xxh3_128()
    for path in weight_files(model):
        state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
    return state.hexdigest()[:16]


class Namespaces:
    """The namespace of each user's KV, as of now. Scheduler thread only.

    Args:
        model: name of the model.
        version: of its weights.
        facts: see :func:`fingerprint`.

    """

    def __init__(self, model: str, version: str, facts: Any) -> None:
        self._model = model
        self._fingerprint = fingerprint(facts)
        self._announced = ""
        self._set_version(version)
        self._adapters: dict[int, tuple[float, str]] = {}

    def of(self, key: UserKey, adapter_id: int) -> str:
        """The namespace of KV that is computed for ``key`` now; "" if the version of an adapter's weights is unknown.

        Args:
            key: the user and its adapter.
            adapter_id: vLLM's number of the adapter, a new one each time it is loaded by name; 0 without one.

        """
        if not key.scope.lora_name:
            return self._name
        adapter = self._adapter(adapter_id, key.scope.lora_path)
        return f"{self._name}#{_quoted(adapter)}" if adapter else ""

    def announce(self, version: str) -> None:
        """The next :meth:`renew` is to new weights of this version."""
        self._announced = version

    def renew(self) -> None:
        """The weights have changed. Without an announced version the new name is unique, and no KV is shared."""
        self._set_version(self._announced or f"{self.version.split('~')[0]}~{uuid.uuid4().hex[:16]}")
        self._announced = ""

    def _set_version(self, version: str) -> None:
        self.version = version
        self._name = "#".join(map(_quoted, (self._model, version, self._fingerprint)))

    def _adapter(self, adapter_id: int, path: str) -> str:
        """Digest of an adapter's weights as they were when it was first seen under this number.

        "" if the files have changed since, because then it is unknown which of them the engine has loaded.
        """
        try:
            newest = max(entry.stat().st_mtime for entry in os.scandir(path))
            if adapter_id not in self._adapters:
                self._adapters[adapter_id] = (newest, weights_fingerprint(path))
        except (OSError, ValueError, InvalidSettingError):
            return ""
        seen, digest = self._adapters[adapter_id]
        return digest if seen == newest else ""


def _quoted(part: str) -> str:
    return quote(part, safe="~")

"""Seconds that a worker spends in the model: what cannot be saved by anything around it.

vLLM adds this class to its worker (``--worker-extension-cls forward_timer.ForwardTimer``).
"""

import time
from typing import Any


class ForwardTimer:
    """Methods for vLLM's ``collective_rpc``."""

    model_runner: Any

    def start_timer(self) -> None:
        """Time the model's forward pass and its pooler from now on."""
        model = self.model_runner.model
        self._seconds = 0.0
        model.forward = self._timed(model.forward)
        model.pooler.forward = self._timed(model.pooler.forward)

    def take_seconds(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - start

        return timed

"""Where a request's history came from, on its way from the scheduler to the request's output.

vLLM hands ``kv_transfer_params`` from the scheduler to the front end when a request ends. The tiers travel in them
under a key of their own, and the front end takes them out before it makes the output. Outputs of users' requests have
an attribute ``userkv_tiers``: history tokens by tier (``hbm``, ``dram``, ``ssd``; a tier that gave none is missing).
"""

from collections.abc import Callable, Mapping
from typing import Any

_KEY = "userkv_tiers"


def attach(kv_params: Mapping[str, Any] | None, tiers: Mapping[str, int]) -> dict[str, Any]:
    """``kv_transfer_params`` with the tiers. Engine process."""
    return {**(kv_params or {}), _KEY: dict(tiers)}


def to_output(make_request_output: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's ``RequestState.make_request_output``, with the tiers moved to the output. Front end."""

    def replacement(
        state: Any,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        kv_transfer_params: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        tiers = None
        if kv_transfer_params and _KEY in kv_transfer_params:
            tiers = kv_transfer_params[_KEY]
            kv_transfer_params = {key: value for key, value in kv_transfer_params.items() if key != _KEY} or None
        output = make_request_output(
            state, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, *args, **kwargs
        )
        if output is not None and tiers is not None:
            output.userkv_tiers = tiers
        return output

    return replacement

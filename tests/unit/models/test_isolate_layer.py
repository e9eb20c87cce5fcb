"""Which attention layers get their candidates isolated, and which are refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from userkv.models.attention.isolate import isolate_layer


class Stock:
    """As vLLM's implementations, as far as it is looked at."""

    def __init__(self, **changes: Any) -> None:
        self.sliding_window = -1
        self.alibi_slopes = None
        self.logits_soft_cap = 0
        self.sinks = None
        self.kv_cache_dtype = "auto"
        vars(self).update(changes)


class Isolated(Stock):
    pass


class Backend:
    @staticmethod
    def get_impl_cls() -> type[Isolated]:
        return Isolated


def isolate(impl: object) -> Any:
    layer: Any = SimpleNamespace(impl=impl, attn_backend=None)
    isolate_layer(layer, Stock, Backend, -1)
    return layer


def test_a_plain_layer() -> None:
    layer = isolate(impl := Stock())
    assert layer.impl is impl
    assert type(layer.impl) is Isolated
    assert layer.attn_backend is Backend


@pytest.mark.parametrize(
    ("impl", "says"),
    [
        (Isolated(), "in Stock only, not in Isolated"),
        (Stock(sliding_window=128), "a sliding window"),
        (Stock(alibi_slopes=[0.5]), "ALiBi"),
        (Stock(logits_soft_cap=30.0), "a soft cap"),
        (Stock(sinks=[1.0]), "sinks"),
        (Stock(kv_cache_dtype="fp8_e5m2"), "over an FP8 KV cache"),
    ],
)
def test_what_candidates_would_not_get_is_refused(impl: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        isolate(impl)

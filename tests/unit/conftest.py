import pytest

from tests.support.patching import put_users_into_vllm


@pytest.fixture
def patched_vllm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """vLLM with UserKV in it, in this process, until the test ends."""
    put_users_into_vllm(monkeypatch)
    return monkeypatch

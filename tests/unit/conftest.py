import pytest


@pytest.fixture
def patched_vllm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """vLLM with UserKV in it, in this process, until the test ends."""
    from userkv.engine import patches, plugin

    monkeypatch.setenv("KV_MANAGER_FOR_GR", "1")
    monkeypatch.setattr(plugin, "_installed", True)
    for owner, name, value in list(patches.replacements()):
        monkeypatch.setattr(owner, name, value)
    return monkeypatch

"""UserKV in this process's vLLM for the length of a test, whatever other tests did before."""

import pytest


def put_users_into_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what the plugin sets, so that it can be undone; engine processes load the plugin itself."""
    from userkv.engine import plugin
    from userkv.engine.vllm_compat import patches

    monkeypatch.setenv("KV_MANAGER_FOR_GR", "1")
    monkeypatch.setattr(plugin, "_installed", True)
    for owner, name, value in list(patches.replacements()):
        monkeypatch.setattr(owner, name, value)
    patches.register_connector()


def put_only_models_into_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what the plugin sets where the user cache is off."""
    from vllm.v1.engine.input_processor import InputProcessor

    from userkv.engine import admission, plugin

    monkeypatch.setenv("KV_MANAGER_FOR_GR", "0")
    monkeypatch.setattr(plugin, "_installed", True)
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)  # To be put back.
    admission.install_for_ranking_models()

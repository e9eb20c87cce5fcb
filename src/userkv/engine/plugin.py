"""The entry point of group ``vllm.general_plugins``: vLLM calls it in each of its processes."""

from userkv.cache.settings import CacheSettings

_installed = False


def register() -> None:
    """Make the ranking models known, and install the user cache if ``KV_MANAGER_FOR_GR`` is on.

    Without it vLLM stays as it is, but for checks of ranking models' prompts. They then run on vLLM's own KV cache.

    Raises:
        InvalidSettingError: an environment variable of ours has a value that cannot be used.

    """
    from userkv.engine import admission
    from userkv.models import registry

    registry.register()
    global _installed
    if _installed:
        return
    if not CacheSettings.is_enabled():
        admission.install_for_ranking_models()
        _installed = True
        return
    CacheSettings.from_env()  # A setting that cannot be used should stop the start, not the engine's process later.
    # Imported here, so that a vLLM without the cache does not pay for it.
    from userkv.engine.vllm_compat import patches

    patches.install()
    _installed = True

"""vLLM's offline engine with users: the second request of a user takes its history from the cache.

Run: ``python examples/offline_engine.py``
"""

import os

os.environ["KV_MANAGER_FOR_GR"] = "1"  # Before vLLM is imported: its plugins read it.

from vllm import LLM, SamplingParams

from userkv.serving.demo_model import ensure_demo_model

HISTORY = list(range(100, 400))


def main() -> None:
    """Ask for the same user twice, with other candidates."""
    llm = LLM(
        str(ensure_demo_model()),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_cache_memory_bytes=2**26,
    )
    user = {"user_id": "bob", "history_len": len(HISTORY)}
    params = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": user})
    for candidates in ([500, 501], [600, 601, 602]):
        (output,) = llm.generate({"prompt_token_ids": [*HISTORY, *candidates]}, params, use_tqdm=False)
        print(f"{output.num_cached_tokens} of {len(HISTORY)} history tokens cached")


if __name__ == "__main__":
    main()

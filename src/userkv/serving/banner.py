"""What ``userkv serve`` prints once the server answers."""

from __future__ import annotations

import json
import re
import shlex
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import userkv
from userkv.cache.settings import MAX_USERS, MIN_FREE_BLOCKS, CacheSettings
from userkv.serving import pool_options
from userkv.serving.launch_plan import LaunchPlan
from userkv.serving.served_model import example_items

EXAMPLE_HISTORY_LEN = 20
EXAMPLE_PROMPT = [
    *(21, 2190, 35, 2201, 16, 2184, 77, 2300, 58, 2195, 101, 2188, 40, 2210, 19, 2255, 63, 2197, 88, 2231),
    *(52, 2186, 30, 2240),
]
"""Ten items of history and two candidates in the demo model's vocabulary: each item is an ``a`` and a ``b`` token."""

EXAMPLE_HISTORY_ITEMS = 10
"""Items of history in the ranking example; two candidates follow."""

_POLL_SECONDS = 0.25


def start_banner(plan: LaunchPlan, settings: CacheSettings) -> threading.Event:
    """Print the banner from a background thread once the server is healthy; set the returned event to call it off."""
    stop = threading.Event()
    threading.Thread(target=_print_when_ready, args=(plan, settings, stop), name="userkv-banner", daemon=True).start()
    return stop


def _print_when_ready(plan: LaunchPlan, settings: CacheSettings, stop: threading.Event) -> None:
    url = base_url(plan)
    while _get(f"{url}/health") is None:
        if stop.wait(_POLL_SECONDS):
            return
    print(render_banner(plan, settings, _get(f"{url}/metrics") or ""), flush=True)


def base_url(plan: LaunchPlan) -> str:
    """Where a client on this machine reaches the server."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(plan.host, plan.host)
    return f"http://[{host}]:{plan.port}" if ":" in host else f"http://{host}:{plan.port}"


def render_banner(plan: LaunchPlan, settings: CacheSettings, metrics: str) -> str:
    """The text: what is served, the cache and its limits, and a command to try. ``metrics`` is vLLM's ``/metrics``."""
    lines = [
        f"UserKV {userkv.__version__} serves {plan.served_name} on {base_url(plan)} (Ctrl-C ends it)",
        f"  model     {plan.model}",
    ]
    blocks, block_size = _label(metrics, "num_gpu_blocks"), _label(metrics, "block_size")
    if blocks and block_size:
        lines.append(f"  KV cache  {blocks} blocks of {block_size} tokens, {blocks * block_size} tokens in all")
    lines.append(f"  users     {_limits(settings)}" if plan.users else "  users     off (--no-users)")
    if plan.users:
        lines.append(f"  pool      {pool_options.describe(plan.pool)}")
        lines.append("Try this; sent again, its answer says in cached_tokens that alice's history was not computed:")
    else:
        lines.append("Try this:")
    lines.append(curl_line(plan))
    return "\n".join(lines)


def curl_line(plan: LaunchPlan) -> str:
    """A shell command that sends one request with a user, and works when pasted."""
    path, fields = ("/v1/rank", _ranking(plan)) if plan.ranks else ("/v1/completions", _completion())
    header = shlex.quote("Content-Type: application/json")
    body = shlex.quote(json.dumps({"model": plan.served_name, **fields}))
    return f"curl -sS {base_url(plan)}{path} -H {header} -d {body}"


def _ranking(plan: LaunchPlan) -> dict[str, Any]:
    items = example_items(Path(plan.model))
    return {"user_id": "alice", "history": items[:EXAMPLE_HISTORY_ITEMS], "candidates": items[EXAMPLE_HISTORY_ITEMS:]}


def _completion() -> dict[str, Any]:
    return {
        "prompt": EXAMPLE_PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {"user_id": "alice", "history_len": EXAMPLE_HISTORY_LEN},
    }


def _limits(settings: CacheSettings) -> str:
    if not settings.lru:
        return "no limit but the KV cache itself"
    users = f"at most {settings.max_users}" if settings.max_users else "any number"
    free = settings.min_free_blocks or "as many as ordinary prefixes need"
    return f"{users} ({MAX_USERS}), blocks kept free: {free} ({MIN_FREE_BLOCKS})"


def _label(metrics: str, name: str) -> int:
    """A number among the labels of ``vllm:cache_config_info``, 0 if it is not there."""
    found = re.search(rf'^vllm:cache_config_info{{.*\b{name}="(\d+)"', metrics, re.MULTILINE)
    return int(found[1]) if found else 0


def _get(url: str) -> str | None:
    """The body of a successful answer, or ``None``."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None

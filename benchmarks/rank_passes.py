"""One isolated pass over N candidates, against N requests that share the history, and against scoring labels.

    .venv/bin/python benchmarks/rank_passes.py --json FILE

Real engines with the same Qwen3-shaped weights (8 layers, width 512, float32), the history known to all of them:

- one pass: a ranking request with N candidates of two tokens (UserKV, history in HBM);
- N requests: the same model, one candidate in each, all submitted at once (UserKV, history in HBM);
- N requests, vLLM: the stock decoder with automatic prefix caching, the same prompts, all submitted at once;
- labels, vLLM: the stock decoder, N labels of one token each as log-probabilities of the next token, 128 per request.

Engines run in turn, as there is memory and CPU for one; within an engine the cases take turns. Medians.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rank_models import QWEN3, qwen3

from userkv.ranking.spec import RankingSpec, load_spec
from userkv.serving.demo_model import VOCAB_SIZE, ensure_model

TOKENS = (512, 2048, 4096)
CANDIDATES = (16, 128, 512)
LABELS_PER_REQUEST = 128
ONE_PASS, MANY, MANY_VLLM, LABELS = "one pass", "N requests", "N requests, vLLM", "labels, vLLM"

Case = tuple[int, int, str]


@contextmanager
def engine(model: Path, *, users: bool, **options: Any) -> Iterator[Any]:
    """An offline engine with a KV cache of 1 GiB."""
    from userkv.replay.engine_target import prepare_environment

    prepare_environment(users)
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        kv_cache_memory_bytes=2**30,
        max_model_len=6000,
        max_num_batched_tokens=6016,
        max_num_seqs=512,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def time_cases(works: dict[Case, Callable[[], object]], rounds: int) -> dict[Case, float]:
    """Median seconds of each, taking turns; the first round warms up, and makes the histories known."""
    seconds: dict[Case, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for case, work in works.items():
            start = time.perf_counter()
            work()
            seconds[case].append(time.perf_counter() - start)
    return {case: statistics.median(samples[1:]) for case, samples in seconds.items()}


def ranker_works(llm: Any, spec: RankingSpec) -> dict[Case, Callable[[], object]]:
    """One pass, and a request per candidate."""
    from vllm import PoolingParams

    rng = random.Random(0)

    def rank(user: str, history: list[int], candidates: list[list[int]]) -> None:
        prompts = [spec.prompt(history, some) for some in candidates]
        params = [
            PoolingParams(
                task="classify", extra_kwargs={"kv_transfer_params": {"user_id": user, "history_len": p.history_len}}
            )
            for p in prompts
        ]
        tokens = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        outputs = llm.encode(tokens, pooling_params=params, pooling_task="classify", use_tqdm=False)
        assert sum(len(output.outputs.data) for output in outputs) == sum(map(len, candidates))

    works: dict[Case, Callable[[], object]] = {}
    for tokens in TOKENS:
        history = items(rng, tokens // 2)
        for candidates in CANDIDATES:
            works[tokens, candidates, ONE_PASS] = lambda h=history, n=candidates: rank(f"u{len(h)}", h, [items(rng, n)])
            works[tokens, candidates, MANY] = lambda h=history, n=candidates: rank(
                f"u{len(h)}", h, [[item] for item in items(rng, n)]
            )
    return works


def decoder_works(llm: Any, spec: RankingSpec) -> dict[Case, Callable[[], object]]:
    """A request per candidate, and labels."""
    from vllm import SamplingParams

    rng = random.Random(0)
    plain = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def many(history: list[int], candidates: list[int]) -> None:
        prompts = [{"prompt_token_ids": spec.prompt(history, [item]).token_ids} for item in candidates]
        llm.generate(prompts, plain, use_tqdm=False)

    def labels(history: list[int], number: int) -> None:
        tokens = rng.sample(range(16, VOCAB_SIZE), number)
        chunks = [tokens[at : at + LABELS_PER_REQUEST] for at in range(0, number, LABELS_PER_REQUEST)]
        params = [
            SamplingParams(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=chunk) for chunk in chunks
        ]
        prompt = {"prompt_token_ids": spec.prompt(history, []).token_ids}
        llm.generate([prompt] * len(chunks), params, use_tqdm=False)

    works: dict[Case, Callable[[], object]] = {}
    for tokens in TOKENS:
        history = items(rng, tokens // 2)
        for candidates in CANDIDATES:
            works[tokens, candidates, MANY_VLLM] = lambda h=history, n=candidates: many(h, items(rng, n))
            works[tokens, candidates, LABELS] = lambda h=history, n=candidates: labels(h, n)
    return works


def items(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2168**2) for _ in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description="ways to score N candidates of a user whose history is cached")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the medians in seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ranker, _, _ = qwen3(Path(directory))
    spec = load_spec(ranker)
    with engine(ranker, users=True, runner="pooling") as llm:
        seconds = time_cases(ranker_works(llm, spec), args.rounds)
    with engine(ensure_model(QWEN3, name="userkv-bench"), users=False, max_logprobs=LABELS_PER_REQUEST) as llm:
        seconds |= time_cases(decoder_works(llm, spec), args.rounds)
    print(f"| history | candidates | {ONE_PASS} | {MANY} | {MANY_VLLM} | {LABELS} |")
    print("|---:|---:|---:|---:|---:|---:|")
    for tokens in TOKENS:
        for candidates in CANDIDATES:
            one = seconds[tokens, candidates, ONE_PASS]
            others = [seconds[tokens, candidates, way] for way in (MANY, MANY_VLLM, LABELS)]
            cells = [f"{other * 1e3:.0f} ms ({other / one:.1f}x)" for other in others]
            print(f"| {tokens} | {candidates} | {one * 1e3:.0f} ms | {' | '.join(cells)} |")
    if args.json:
        args.json.write_text(json.dumps({"/".join(map(str, case)): value for case, value in seconds.items()}, indent=1))


if __name__ == "__main__":
    main()

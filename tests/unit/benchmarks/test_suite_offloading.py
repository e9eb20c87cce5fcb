"""The medium for vLLM's OffloadingConnector on a CPU."""

import torch
from benchmarks.suite.peers.cpu_offloading_spec import OBJECTS, USED_BYTES, CopyingWorker, CountingManager, runs
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

BLOCKS, CHUNKS, LAYERS, BLOCK_BYTES = 12, 8, 3, 16

PAIRS = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, CHUNKS - 1)),
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    min_size=1,
)


def engine_blocks(blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=(len(blocks),), block_indices=(0,))


@given(pairs=PAIRS)
def test_runs_are_the_pairs(pairs: list[tuple[int, int]]) -> None:
    found = runs(sorted(pairs))
    assert [(source + i, target + i) for source, target, length in found for i in range(length)] == sorted(pairs)
    # Neighbours on both sides are in one run.
    ends = {(source + length, target + length) for source, target, length in found}
    assert not ends & {(source, target) for source, target, _ in found}


@settings(max_examples=30, deadline=None)
@given(pairs=PAIRS, data=st.data())
def test_blocks_come_back_as_they_were(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    caches = [torch.randint(-128, 128, (BLOCKS, BLOCK_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
    stored = [cache.clone() for cache in caches]
    worker = CopyingWorker(caches, CHUNKS)
    blocks, chunks = (list(column) for column in zip(*pairs, strict=True))
    worker.submit_store(1, engine_blocks(blocks), CPULoadStoreSpec(chunks))
    worker.wait({1, 99})
    for cache in caches:
        cache.zero_()
    others = data.draw(st.permutations(range(BLOCKS)))[: len(blocks)]
    worker.submit_load(2, CPULoadStoreSpec(chunks), engine_blocks(others))
    worker.wait({2})
    results = {result.job_id: result for result in worker.get_finished()}
    worker.shutdown()
    assert {job_id: result.transfer_size for job_id, result in results.items()} == dict.fromkeys(
        (1, 2), len(pairs) * LAYERS * BLOCK_BYTES
    )
    for cache, original in zip(caches, stored, strict=True):
        expected = torch.zeros_like(cache)
        expected[others] = original[blocks]
        assert torch.equal(cache, expected)


def test_the_manager_tells_how_full_it_is() -> None:
    manager = CountingManager(1000, num_chunks=4)
    context = ReqContext("r")
    manager.on_new_request(context)
    for number in range(6):  # The pool has room for four.
        key = make_offload_key(bytes([number]) * 32, 0)
        assert manager.prepare_store([key], context) is not None
        manager.complete_store([key], context)
        stats = manager.get_stats()
        assert stats is not None
        gauges = {name: values[()] for name, values in stats.data["data"].items() if name in (OBJECTS, USED_BYTES)}
        held = min(number + 1, 4)
        assert gauges == {OBJECTS: held, USED_BYTES: held * 1000}

"""Addresses of KV blocks: whatever the layout, a block's pieces are exactly its bytes, in the same order for each."""

import ctypes
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kv_layouts import BLOCKS, HEADS, KINDS, KV, LAYERS, contents, in_order, kernel_blocks, two_planes
from userkv.core.errors import UnsupportedEngineError
from userkv.engine.pool.worker.kv_layout import NOWHERE, KVLayout
from userkv.store.backend import Region

ALL = range(LAYERS)


@pytest.fixture(params=KINDS)
def kv(request: pytest.FixtureRequest) -> KV:
    return KINDS[request.param](BLOCKS)


def layout_of(kv: KV, blocks: int = BLOCKS) -> KVLayout:
    return KVLayout.of(kv.tensors, blocks)


def elements(data: bytes, tensor: torch.Tensor) -> list[int]:
    return sorted(torch.frombuffer(bytearray(data), dtype=tensor.dtype).tolist())


def test_a_block_is_exactly_its_bytes(kv: KV) -> None:
    layout = layout_of(kv)
    for layer in ALL:
        for block in range(BLOCKS):
            view = kv.block(layer, block)
            regions = layout.regions([block], [layer])
            assert len(regions) == kv.pieces
            assert regions == sorted(regions)  # In one order in all engines: that of addresses.
            assert elements(contents(regions), view) == sorted(view.flatten().tolist())
    assert layout.layer_names == tuple(kv.tensors)
    assert layout.num_blocks == BLOCKS
    assert layout.block_nbytes == sum(map(kv.nbytes, ALL))
    assert layout.largest_piece == max(kv.nbytes(layer) // kv.pieces for layer in ALL)


def test_bytes_of_some_blocks_fit_into_others(kv: KV) -> None:
    layout = layout_of(kv)
    old, new = [1, 2, 5, 0], [6, 3, 4, 0]
    before = [[kv.block(layer, block).clone() for block in range(BLOCKS)] for layer in ALL]
    data, at = contents(layout.regions(old, ALL)), 0
    for address, nbytes in layout.regions(new, ALL):
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes
    assert at == len(data)
    for layer in ALL:
        for block in range(BLOCKS):
            source = old[new.index(block)] if block in new else block
            assert torch.equal(kv.block(layer, block), before[layer][source])


def test_layer_by_layer_in_the_order_asked_for(kv: KV) -> None:
    layout = layout_of(kv)
    parts = [layout.regions([4, 5], [layer]) for layer in (1, 0)]
    assert layout.regions([4, 5], [1, 0]) == parts[0] + parts[1]
    assert layout.regions([], ALL) == []


@pytest.mark.parametrize(("kind", "regions"), [("LBHNC", 1), ("two planes", 2), ("kernel blocks", 1), ("LHBNC", HEADS)])
def test_neighbours_are_joined(kind: str, regions: int) -> None:
    kv = KINDS[kind](BLOCKS)
    layout = layout_of(kv)
    assert len(layout.regions([2, 3, 4], [0])) == regions
    assert len(layout.regions([2, 4, 5], [0])) == 2 * regions
    assert len(layout.regions([4, 3, 2], [0])) == 3 * regions
    assert sum(region.nbytes for region in layout.regions([2, 3, 4], [0])) == 3 * kv.nbytes(0)


@pytest.mark.parametrize("kind", ["BLHNC", "padded"])
def test_blocks_with_something_between_are_not_joined(kind: str) -> None:
    kv = KINDS[kind](BLOCKS)
    assert [region.nbytes for region in layout_of(kv).regions([2, 3, 4], [0])] == [kv.nbytes(0)] * 3


def test_a_block_apart(kv: KV) -> None:
    layout = layout_of(kv)
    alone = layout.regions([3], ALL)
    for blocks in ([2, 3, 4], [3, 4], [2, 3], [3]):
        parts = layout.regions(blocks, ALL, apart=3)
        assert set(alone) <= set(parts)
        assert contents(parts) == contents(layout.regions(blocks, ALL))
    assert layout.regions([4, 5], ALL, apart=3) == layout.regions([4, 5], ALL)


def test_bytes_that_nobody_wants(kv: KV) -> None:
    layout = layout_of(kv)
    for layer in ALL:
        wanted, unwanted = layout.regions([1], [layer]), layout.regions([None, None], [layer])
        assert {region.address for region in unwanted} == {NOWHERE}
        assert all(region.nbytes <= layout.largest_piece for region in unwanted)
        assert sum(region.nbytes for region in unwanted) == 2 * kv.nbytes(layer)
        mixed = layout.regions([None, 1, None], [layer])
        assert [region for region in mixed if region.address != NOWHERE] == wanted
        assert len(mixed) == 3 * kv.pieces


@given(
    blocks=st.lists(st.none() | st.integers(0, BLOCKS - 1), max_size=12),
    apart=st.integers(-1, BLOCKS - 1),
    kind=st.sampled_from(["LBHNC", "two planes", "padded"]),
)
def test_joined_or_not_the_bytes_and_their_order_are_the_same(blocks: list[int | None], apart: int, kind: str) -> None:
    layout = layout_of(KINDS[kind](BLOCKS))
    planes = 2 if kind == "two planes" else 1
    pieces = [layout.regions([block], [0]) for block in blocks]
    one_by_one = [piece[plane] for plane in range(planes) for piece in pieces]
    regions = layout.regions(blocks, [0], apart)
    assert byte_addresses(regions) == byte_addresses(one_by_one)
    if apart in blocks:
        assert all(region in regions for region in layout.regions([apart], [0]))
    if kind == "LBHNC":
        alone = set(layout.regions([apart], [0])) if apart >= 0 else set()
        for first, second in itertools.pairwise(regions):
            touching = first.address != NOWHERE and first.address + first.nbytes == second.address
            assert not touching or {first, second} & alone


def byte_addresses(regions: list[Region]) -> list[int]:
    return [at for address, nbytes in regions for at in (range(address, address + nbytes) if address else [0] * nbytes)]


def test_all_memory_is_announced_and_no_more(kv: KV) -> None:
    layout = layout_of(kv)
    spans = layout.spans()
    for layer in ALL:
        for address, nbytes in layout.regions(range(BLOCKS), [layer]):
            assert any(span[0] <= address and address + nbytes <= span[0] + span[1] for span in spans)
    storages = {(s.data_ptr(), s.nbytes()) for s in (tensor.untyped_storage() for tensor in kv.tensors.values())}
    for address, nbytes in spans:
        assert any(base <= address and address + nbytes <= base + size for base, size in storages)


def test_announced_memory_does_not_overlap(kv: KV) -> None:
    """Transports refuse to register memory twice."""
    spans = layout_of(kv).spans()
    assert all(a.address + a.nbytes <= b.address for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(BLOCKS, 3, 8, 10)[..., ::2], "scattered"),
        (torch.zeros(BLOCKS, 3, 8, 10)[:, ::2], "scattered"),
        (in_order("BHLNC").tensors["layer.1"], "scattered"),
        (torch.zeros(BLOCKS, 3, 8, 10).transpose(2, 3)[:, :, :2, ::2], "scattered"),
        (torch.zeros(5, 3, 8, 10), "no dimension of 7 blocks"),
        (torch.zeros(5, 3, 8, BLOCKS), "no dimension of 7 blocks"),
    ],
)
def test_layouts_that_cannot_be_moved_block_by_block(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message) as error:
        KVLayout.of({"layer.9": tensor}, BLOCKS)
    assert "layer.9" in str(error.value)


# Nobody can tell two planes from two blocks, and no engine runs with two blocks.
@pytest.mark.parametrize(
    ("kind", "blocks"),
    [(kind, blocks) for kind in KINDS for blocks in (1, 2, 3, 8, 10) if blocks != 2 or "two planes" not in kind],
)
def test_as_many_blocks_as_some_other_dimension_has(kind: str, blocks: int) -> None:
    kv = KINDS[kind](blocks)
    layout = layout_of(kv, blocks)
    for layer in ALL:
        for block in range(blocks):
            view = kv.block(layer, block)
            assert elements(contents(layout.regions([block], [layer])), view) == sorted(view.flatten().tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_the_description_does_not_depend_on_the_number_of_blocks(kind: str) -> None:
    """It is part of the namespace: an engine with more memory, or less, still reads what is in the pool."""
    descriptions = {layout_of(KINDS[kind](blocks), blocks).description for blocks in (7, 8, 24, 30, 100)}
    assert len(descriptions) == 1


def test_the_description_tells_layouts_apart() -> None:
    """Engines that agree on it have the bytes of a block in the same order."""
    kinds = [KINDS[kind](BLOCKS) for kind in KINDS]
    kinds += [in_order("LBHNC", heads=4), kernel_blocks(split=2), two_planes(split=4)]
    kinds.append(KV({name: tensor.to(torch.int64) for name, tensor in in_order("LBHNC").tensors.items()}))
    order_of: dict[str, object] = {}
    for kv in kinds:
        layout = layout_of(kv)
        for layer in ALL:
            view = kv.block(layer, 3)
            view.copy_(torch.arange(view.numel()).reshape(view.shape))
        order = [contents(layout.regions([3], [layer])) for layer in ALL]
        assert order_of.setdefault(layout.description, order) == order
    assert len(order_of) >= len(kinds) - 5

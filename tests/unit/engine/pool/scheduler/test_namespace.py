"""The names under which KV is shared: equal exactly if the KV is."""

import json
import os
import random
import shutil
import struct
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core.errors import InvalidSettingError
from userkv.core.pool_settings import PoolSettings
from userkv.core.request import KVScope, UserKey
from userkv.engine.pool.scheduler import namespace, setup
from userkv.engine.pool.scheduler.namespace import Namespaces, code_fingerprint, fingerprint, weights_fingerprint
from userkv.models import registry

SIZES = {"embed": 200_000, "layers.0.q": 5000, "layers.0.k": 4096, "layers.1.q": 17, "norm": 2}
KEY = UserKey("u")


def safetensors(path: Path, tensors: dict[str, bytes], metadata: dict[str, str] | None = None) -> None:
    """A file in the safetensors format, written by hand."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def weights(seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {name: rng.randbytes(size) for name, size in SIZES.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    safetensors(directory / "model.safetensors", weights())
    (directory / "config.json").write_text("{}")
    return directory


class TestWeights:
    """What tells versions of weights apart."""

    @pytest.mark.parametrize("name", SIZES)
    def test_any_tensor_that_training_has_changed(self, model: Path, name: str) -> None:
        before = weights_fingerprint(str(model))
        safetensors(model / "model.safetensors", weights() | {name: weights(1)[name]})
        assert weights_fingerprint(str(model)) != before

    @given(st.data())
    def test_any_byte(self, data: st.DataObject) -> None:
        """A daily refresh may change no more than some rows of an embedding."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.safetensors"
            safetensors(path, weights())
            before = weights_fingerprint(directory)
            contents = bytearray(path.read_bytes())
            contents[data.draw(st.integers(0, len(contents) - 1))] ^= data.draw(st.integers(1, 255))
            path.write_bytes(contents)
            assert weights_fingerprint(directory) != before

    def test_tensors_that_change_places_or_names(self, model: Path) -> None:
        before = weights_fingerprint(str(model))
        tensors = weights()
        safetensors(model / "model.safetensors", dict(reversed(tensors.items())))
        assert weights_fingerprint(str(model)) != before
        safetensors(model / "model.safetensors", {f"{name}.weight": data for name, data in tensors.items()})
        assert weights_fingerprint(str(model)) != before

    def test_another_place_another_day(self, model: Path, tmp_path: Path) -> None:
        copy = tmp_path / "elsewhere" / "v7"
        shutil.copytree(model, copy)
        os.utime(copy / "model.safetensors", (1, 1))
        (copy / "README.md").write_text("not a weight")
        assert weights_fingerprint(str(copy)) == weights_fingerprint(str(model))
        assert weights_fingerprint(f"{copy}/") == weights_fingerprint(str(model))

    def test_links_to_files_count(self, model: Path, tmp_path: Path) -> None:
        """Hubs keep a model as links into a store."""
        linked = tmp_path / "snapshot"
        linked.mkdir()
        (linked / "model.safetensors").symlink_to(model / "model.safetensors")
        assert weights_fingerprint(str(linked)) == weights_fingerprint(str(model))

    def test_every_file_counts(self, model: Path) -> None:
        prints = [weights_fingerprint(str(model))]
        safetensors(model / "model-2.safetensors", {"head": b"x" * 100})
        prints.append(weights_fingerprint(str(model)))
        safetensors(model / "model-2.safetensors", {"head": b"y" * 100})
        prints.append(weights_fingerprint(str(model)))
        (model / "extra.bin").write_bytes(b"z" * 10_000)
        prints.append(weights_fingerprint(str(model)))
        (model / "model.safetensors").rename(model / "model-1.safetensors")
        prints.append(weights_fingerprint(str(model)))
        assert len(set(prints)) == 5

    def test_where_one_file_ends_and_the_next_begins(self, tmp_path: Path) -> None:
        prints = set()
        for first, second in ((b"xy", b"z"), (b"x", b"yz"), (b"", b"xyz")):
            (tmp_path / "1.bin").write_bytes(first)
            (tmp_path / "2.bin").write_bytes(second)
            prints.add(weights_fingerprint(str(tmp_path)))
        assert len(prints) == 3

    @pytest.mark.parametrize("suffix", ["bin", "pt"])
    def test_other_formats(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"model.{suffix}"
        prints = set()
        for data in (b"", b"x", b"x" * 9, b"x" * 100_000, b"x" * 100_001, random.Random(1).randbytes(100_000)):
            path.write_bytes(data)
            prints.add(weights_fingerprint(str(tmp_path)))
        assert len(prints) == 6

    def test_the_pieces_in_which_a_file_is_read_do_not_matter(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model.bin").write_bytes(random.Random(1).randbytes(100_000))
        before = weights_fingerprint(str(tmp_path))
        monkeypatch.setattr(namespace, "_CHUNK", 999)
        assert weights_fingerprint(str(tmp_path)) == before

    @pytest.mark.parametrize("where", ["empty", "missing", "Qwen/Qwen3-0.6B"])
    def test_no_weights_here(self, tmp_path: Path, where: str) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(InvalidSettingError, match="weights_version") as error:
            weights_fingerprint(str(tmp_path / where))
        assert "\n" not in str(error.value)


class TestFacts:
    """What else decides about KV."""

    def test_any_fact(self) -> None:
        facts = {"config": {"layers": 2, "heads": [1, 2]}, "dtype": "float32", "block_size": 16, "none": None}
        others = [
            facts | {"dtype": "bfloat16"},
            facts | {"block_size": 32},
            facts | {"block_size": "16"},
            facts | {"config": {"layers": 2, "heads": [2, 1]}},
            {name: value for name, value in facts.items() if name != "none"},
        ]
        assert len({fingerprint(each) for each in [facts, *others]}) == 6
        assert fingerprint(dict(reversed(facts.items()))) == fingerprint(facts)

    def test_it_is_the_same_in_every_process(self) -> None:
        """And in every version: another value makes all that is stored unreadable."""
        assert fingerprint({"a": [1, "x", None]}) == "22c4b82b18d9801b"


class TestCode:
    """Of models that are ours: with other code, the same weights have other KV."""

    def test_any_change_of_a_file_or_its_name(self, tmp_path: Path) -> None:
        def digest(files: dict[str, str]) -> str:
            directory = Path(tempfile.mkdtemp(dir=tmp_path)) / "models"
            for name, text in files.items():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                (directory / name).write_text(text)
            return code_fingerprint(directory.rglob("*.py"))

        files = {"a.py": "x = 1", "hstu/b.py": "y = 2"}
        others = [{**files, "a.py": "x = 2"}, {**files, "c.py": ""}, {"a.py": "x = 1", "hstu/c.py": "y = 2"}]
        assert len({digest(each) for each in [files, *others]}) == 4
        assert digest(dict(reversed(files.items()))) == digest(files)

    def test_it_is_a_fact_of_our_models_and_of_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def facts(architecture: str) -> Any:
            model = SimpleNamespace(
                hf_config=SimpleNamespace(to_dict=dict),
                architectures=[architecture],
                dtype="float32",
                quantization=None,
            )
            config = SimpleNamespace(
                model_config=model,
                cache_config=SimpleNamespace(cache_dtype="auto", block_size=128),
                parallel_config=SimpleNamespace(world_size=1),
            )
            return setup.namespace_facts(config, PoolSettings(), [])  # type: ignore[arg-type]

        before = {name: fingerprint(facts(name)) for name in ("HSTURanker", "Qwen3Ranker", "Qwen3ForCausalLM")}
        monkeypatch.setattr(registry, "code_files", list)
        after = {name: fingerprint(facts(name)) for name in before}
        assert {name for name in before if before[name] != after[name]} == {"HSTURanker", "Qwen3Ranker"}

    def test_positions_are_a_part_of_it(self) -> None:
        assert {"silu.py", "ranker.py", "qwen3.py", "prompt.py"} <= {path.name for path in registry.code_files()}


class TestVersions:
    """Weights that change while the engine runs."""

    def test_a_name_says_it_all(self) -> None:
        names = {
            Namespaces(model, version, facts).of(KEY, 0)
            for model in ("m", "n")
            for version in ("v1", "v2")
            for facts in ({"a": 1}, {"a": 2})
        }
        assert len(names) == 8
        assert Namespaces("m", "v1", {"a": 1}).of(KEY, 0) == Namespaces("m", "v1", {"a": 1}).of(UserKey("v"), 5)

    @given(model=st.text("ab#~", max_size=3), version=st.text("ab#~", max_size=3), cut=st.integers(0, 7))
    def test_whatever_the_parts_are_called(self, model: str, version: str, cut: int) -> None:
        text = f"{model}#{version}"
        place = [at for at, letter in enumerate(text) if letter == "#"]
        at = place[cut % len(place)]
        other = (text[:at], text[at + 1 :])
        names = {Namespaces(*parts, 0).of(KEY, 0) for parts in ((model, version), other)}
        assert len(names) == len({(model, version), other})

    def test_nobody_has_announced_a_version(self) -> None:
        spaces = [Namespaces("m", "v", 0) for _ in range(2)]
        names = [spaces[0].of(KEY, 0)]
        for space in spaces * 2:
            space.renew()
            names.append(space.of(KEY, 0))
        assert len(set(names)) == 5
        assert all(len(name) < 60 for name in names)

    def test_an_announced_version_is_for_the_next_renewal_alone(self) -> None:
        space = Namespaces("m", "v1", 0)
        space.announce("v2")
        assert space.of(KEY, 0) == Namespaces("m", "v1", 0).of(KEY, 0)
        space.renew()
        assert space.of(KEY, 0) == Namespaces("m", "v2", 0).of(KEY, 0)
        space.renew()
        assert space.of(KEY, 0) != Namespaces("m", "v2", 0).of(KEY, 0)
        space.announce("v3")
        space.announce("v1")
        space.renew()
        assert space.of(KEY, 0) == Namespaces("m", "v1", 0).of(KEY, 0)


class TestAdapters:
    """KV that an adapter has computed belongs to its weights."""

    def of(self, space: Namespaces, directory: Path, number: int = 1, name: str = "a") -> str:
        return space.of(UserKey("u", KVScope(name, str(directory))), number)

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Path:
        safetensors(tmp_path / "a1" / "adapter_model.safetensors", {"lora": b"x" * 5000})
        return tmp_path / "a1"

    def test_other_weights_another_name(self, adapter: Path, tmp_path: Path) -> None:
        space = Namespaces("m", "v", 0)
        safetensors(tmp_path / "a2" / "adapter_model.safetensors", {"lora": b"y" * 5000})
        names = {space.of(KEY, 0), self.of(space, adapter), self.of(space, tmp_path / "a2", 2)}
        assert len(names) == 3
        assert self.of(space, adapter) == self.of(space, adapter)

    def test_the_same_weights_elsewhere(self, adapter: Path, tmp_path: Path) -> None:
        shutil.copytree(adapter, tmp_path / "copy")
        other = Namespaces("m", "v", 0)
        assert self.of(Namespaces("m", "v", 0), adapter) == self.of(other, tmp_path / "copy", 7, "b")

    def test_files_that_changed_after_loading(self, adapter: Path) -> None:
        """Nobody knows which of them the engine has."""
        space = Namespaces("m", "v", 0)
        before = self.of(space, adapter)
        safetensors(adapter / "adapter_model.safetensors", {"lora": b"z" * 5000})
        os.utime(adapter / "adapter_model.safetensors", (2e9, 2e9))
        assert self.of(space, adapter) == ""
        # Loaded anew, it has another number.
        after = self.of(space, adapter, number=2)
        assert after not in ("", before)
        assert self.of(space, adapter) == ""

    def test_new_weights_of_the_model(self, adapter: Path) -> None:
        space = Namespaces("m", "v", 0)
        before = self.of(space, adapter)
        space.announce("w")
        space.renew()
        assert self.of(space, adapter) == self.of(Namespaces("m", "w", 0), adapter) != before

    def test_new_weights_do_not_load_adapters_anew(self, adapter: Path) -> None:
        """The engine still computes with the files of an adapter that it read when it loaded it."""
        space = Namespaces("m", "v", 0)
        assert self.of(space, adapter)
        safetensors(adapter / "adapter_model.safetensors", {"lora": b"z" * 5000})
        os.utime(adapter / "adapter_model.safetensors", (2e9, 2e9))
        space.renew()
        assert self.of(space, adapter) == ""

    def test_adapters_that_are_not_here(self, tmp_path: Path) -> None:
        space = Namespaces("m", "v", 0)
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "README.md").write_text("x")
        (tmp_path / "file").write_text("x")
        for path in ("empty", "other", "file", "missing"):
            assert self.of(space, tmp_path / path) == ""
        assert space.of(UserKey("u", KVScope("a", "")), 1) == ""
        assert space.of(UserKey("u", KVScope("a", "owner/name")), 1) == ""

    @pytest.mark.parametrize(
        "header",
        [
            b"",
            b"x" * 100,
            b"\xff\xfe",
            b"[]",
            b"1",
            b'{"a": 1}',
            b'{"a": {}}',
            b'{"a": {"data_offsets": []}}',
            b'{"a": {"data_offsets": ["x", 1]}}',
            b'{"a": {"data_offsets": [-999, 1]}}',
            b'{"a": {"data_offsets": [99999999999999999999, 1]}}',
        ],
    )
    @pytest.mark.parametrize("length", [None, 0, 1 << 40, (1 << 64) - 1])
    def test_a_damaged_file_does_not_end_the_engine(self, adapter: Path, header: bytes, length: int | None) -> None:
        """This runs in the scheduler, for whatever a request names."""
        size = struct.pack("<Q", len(header) if length is None else length)
        (adapter / "adapter_model.safetensors").write_bytes(size + header + b"data")
        assert isinstance(self.of(Namespaces("m", "v", 0), adapter), str)

    def test_a_file_that_is_cut_off(self, adapter: Path) -> None:
        path = adapter / "adapter_model.safetensors"
        data = path.read_bytes()
        for size in (0, 1, 7, 8, 9, 40):
            path.write_bytes(data[:size])
            assert isinstance(self.of(Namespaces("m", "v", 0), adapter), str)

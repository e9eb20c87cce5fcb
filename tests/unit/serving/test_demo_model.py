import json
import threading
from pathlib import Path

import pytest

from userkv.serving import demo_model
from userkv.serving.demo_model import ensure_demo_model, ensure_model, vocabulary

pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 1, "vocab_size": 32}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_demo_model(tmp_path_factory.mktemp("models"))


def test_vocabulary() -> None:
    names = vocabulary()
    assert len(names) == len(set(names)) == demo_model.VOCAB_SIZE
    assert names[:4] == ["<pad>", "<eos>", "<cand>", "<r3>"]
    assert (names[16], names[2183], names[2184], names[-1]) == ("a0", "a2167", "b0", "b2167")


@pytest.mark.parametrize("size", [16, 17, 19])
def test_vocabulary_of_impossible_size(size: int) -> None:
    with pytest.raises(ValueError, match="positive even number"):
        vocabulary(size)


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("USERKV_HOME", str(tmp_path))
    assert ensure_model(SMALL).parent == tmp_path / "models"


def test_written_once_and_readable_by_others(tmp_path: Path) -> None:
    first = ensure_model(SMALL, root=tmp_path)
    weights = first / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert ensure_model(SMALL, root=tmp_path) == first
    assert weights.stat().st_mtime_ns == written
    assert first.stat().st_mode & 0o777 == 0o755
    assert weights.stat().st_mode & 0o777 == 0o644


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def weights(seed: int, root: str) -> bytes:
        return (ensure_model(SMALL, seed=seed, root=tmp_path / root) / "model.safetensors").read_bytes()

    assert weights(1, "a") == weights(1, "b")
    assert weights(1, "a") != weights(2, "a")


def test_each_definition_has_its_own_directory(tmp_path: Path) -> None:
    variants = [SMALL, {**SMALL, "num_key_value_heads": 4}, {**SMALL, "rms_norm_eps": 1e-5}]
    assert len({ensure_model(variant, root=tmp_path) for variant in variants}) == len(variants)


def test_concurrent_writers_agree(tmp_path: Path) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(ensure_model(SMALL, root=tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert list(tmp_path.iterdir()) == [results[0]]


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(demo_model, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        ensure_model(SMALL, root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_config(demo: Path) -> None:
    config = json.loads((demo / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["vocab_size"] == demo_model.VOCAB_SIZE


def test_tokenizer(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo)
    assert len(tokenizer) == demo_model.VOCAB_SIZE
    assert tokenizer("a0 b2167 <cand>")["input_ids"] == [16, 4351, 2]
    assert tokenizer.decode([16, 4351]) == "a0 b2167"


def test_every_part_of_a_history_moves_the_answer(demo: Path) -> None:
    """What makes the model fit for tests of a cache: a wrong token anywhere shows far above float32 noise."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(demo).eval()
    history = torch.randint(16, demo_model.VOCAB_SIZE, (1, 1000), generator=torch.Generator().manual_seed(1))

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(ids).logits[0, -1], dim=-1)

    reference = logprobs(history)
    assert -(reference.exp() * reference).sum() > 4  # nats: the distribution is not degenerate
    for position in (0, 1, 127, 128, 500, 998):
        changed = history.clone()
        changed[0, position] = 16 if changed[0, position] != 16 else 17
        assert (logprobs(changed) - reference).abs().max() > 0.02
    swapped = history.clone()
    swapped[0, [300, 301]] = history[0, [301, 300]]
    assert (logprobs(swapped) - reference).abs().max() > 0.02

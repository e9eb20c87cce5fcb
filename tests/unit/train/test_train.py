"""``userkv train``: it learns a pattern, writes a directory that can be served, and repeats itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support import logs
from userkv import cli
from userkv.models.hstu.reference import isolation_mask
from userkv.ranking.history_window import HistoryWindow
from userkv.ranking.prompt import RankingFormat
from userkv.ranking.spec import load_spec
from userkv.train.evaluate import Case, evaluate, leave_out, popularity
from userkv.train.export import load_ranker
from userkv.train.interactions import read_interactions
from userkv.train.scorer import ModelScorer
from userkv.train.trainer import FIRST_TOKEN, TrainSettings, train

OPTIONS = ("--epochs", "25", "--window", "8", "--layers", "1", "--dim", "16", "--heads", "2")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logs.ratings(tmp_path_factory.mktemp("log") / "ratings.csv")


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory, made by the command."""
    output = tmp_path_factory.mktemp("models") / "ranker"
    assert cli.main(["train", "--data", str(log), "--output", str(output), *OPTIONS, "--seed", "3"]) == 0
    return output


@pytest.fixture
def report(trained: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((trained / "evaluation.json").read_text())
    return loaded


def test_it_learns_what_follows_what(report: dict[str, Any]) -> None:
    losses = [epoch["loss"] for epoch in report["epochs"]]
    assert len(losses) == 25
    assert losses[-1] < 0.6 * losses[0]
    model, baseline = report["test"]["model"], report["test"]["popularity"]
    assert model["users"] == baseline["users"] == 80
    assert baseline["hr"] < 0.6
    assert model["hr"] > 0.95
    assert model["ndcg"] > 0.8
    assert report["data"]["format"] == "ratings"
    assert (report["data"]["users"], report["data"]["items"], report["data"]["events"]) == (80, 40, 960)
    assert "--epochs 25" in report["command"]


def test_the_directory_is_a_ranking_models(trained: Path) -> None:
    spec = load_spec(trained)
    num_items = FIRST_TOKEN + logs.NUM_ITEMS
    assert spec.format == RankingFormat(candidate_offset=num_items)
    assert (spec.vocab_size, spec.tasks, spec.max_history_tokens) == (2 * num_items, ("watch", "like"), 8)
    assert spec.prompt([100, 139], [101]).token_ids == [16, 16 + 39, num_items + 17]
    config = json.loads((trained / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("hstu_ranker", ["HSTURanker"])
    assert config["userkv_ranking"]["history_window"] == {"max_items": 8, "drop_items": 2}
    assert sorted(file.name for file in trained.iterdir()) == [
        "config.json",
        "evaluation.json",
        "items.json",
        "model.safetensors",
    ]
    assert [file for file in trained.parent.iterdir() if file != trained] == []


def test_the_saved_model_scores_as_the_report_says(trained: Path, log: Path, report: dict[str, Any]) -> None:
    interactions = read_interactions(log)
    model = load_ranker(trained)
    cases = list(leave_out(interactions, HistoryWindow(8, 2)))
    found = evaluate(cases, ModelScorer(model, interactions.catalogue, FIRST_TOKEN))
    assert found.as_json() == pytest.approx(report["test"]["model"])
    # The same through prompts, as a server reads requests.
    spec = load_spec(trained)
    assert spec.format is not None
    for case in [*cases[:5], Case("new", [], cases[0].candidates)]:
        prompt = spec.prompt(case.history, case.candidates)
        positions = torch.from_numpy(spec.format.positions(prompt.token_ids))
        with torch.no_grad():
            hidden = model(torch.tensor([prompt.token_ids]), positions[:1], isolation_mask(positions).unsqueeze(0))
            probabilities = torch.sigmoid(model.logits(hidden[0, prompt.history_len :])).numpy()
        scores = probabilities @ np.array(spec.task_weights, np.float32)
        direct = ModelScorer(model, interactions.catalogue, FIRST_TOKEN)(case.history, case.candidates)
        assert scores == pytest.approx(direct, abs=1e-6)


def test_scores_are_probabilities(trained: Path, log: Path) -> None:
    # Of what is drawn and of how many there are, a logit must know nothing: the chances of all items add up to about 1.
    interactions = read_interactions(log)
    model = load_ranker(trained)
    model.config.task_weights = [1.0, 0.0]
    scorer = ModelScorer(model, interactions.catalogue, FIRST_TOKEN)
    everything = interactions.catalogue.tolist()
    sums = [float(np.sum(scorer(case.history, everything))) for case in leave_out(interactions, HistoryWindow(8, 2))]
    assert 0.5 < np.mean(sums) < 2


def test_equal_seeds_give_equal_models(log: Path) -> None:
    interactions = read_interactions(log)

    def weights(seed: int) -> list[torch.Tensor]:
        settings = TrainSettings(epochs=2, window=8, drop=2, dim=8, layers=1, seed=seed)
        return list(train(interactions, settings).model.state_dict().values())

    assert all(torch.equal(one, other) for one, other in zip(weights(1), weights(1), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights(1), weights(2), strict=True))


def test_threads_are_given_back(log: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(read_interactions(log), TrainSettings(epochs=1, window=4, drop=1, dim=4, layers=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_best_epoch_is_kept(log: Path) -> None:
    interactions = read_interactions(log)
    seen = []
    settings = TrainSettings(epochs=3, window=8, drop=2, dim=8, layers=1)
    result = train(interactions, settings, on_epoch=lambda *epoch: seen.append(epoch))
    assert [(epoch, loss) for epoch, loss, _ in seen] == list(enumerate(result.losses, 1))
    best = max(range(3), key=lambda epoch: np.mean(1 / np.log2(1 + np.array(result.validation[epoch].ranks))))
    assert result.best_epoch == best + 1
    assert not result.model.training


@pytest.mark.parametrize(("source", "tasks"), [("otto", 3), ("kuairand", 3)])
def test_other_logs(tmp_path: Path, source: str, tasks: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = getattr(logs, source)(tmp_path / "log")
    words = ["train", "--data", str(path), "--output", str(tmp_path / "m"), "--epochs", "1", "--window", "4"]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "m" / "evaluation.json").read_text())
    assert report["data"]["format"] == source
    assert len(load_spec(tmp_path / "m").tasks) == tasks


def test_the_report_compares_with_popularity(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "empty"
    output.mkdir()
    assert cli.main(["train", "--data", str(log), "--output", str(output), "--epochs", "1", "--window", "4"]) == 0
    printed = capsys.readouterr().out
    interactions = read_interactions(log)
    baseline = evaluate(leave_out(interactions), popularity(interactions))
    row = next(line for line in printed.splitlines() if line.startswith("popularity"))
    assert row.split()[1:] == [f"{value:.4f}" for value in (baseline.hr, baseline.ndcg, baseline.auc)]
    assert f"userkv serve --model {output}" in printed


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--data", "/nowhere"), "/nowhere cannot be read"),
        (("--format", "csv"), "--format must be one of otto, ratings, kuairand"),
        (("--format", "otto"), "not valid JSON"),
        (("--epochs", "0"), "--epochs must be a whole number of 1 or more"),
        (("--window", "1"), "--window must be a whole number of 2 or more"),
        (("--layers", "x"), "--layers must be"),
        (("--dim", "0"), "--dim must be"),
        (("--dim", "10", "--heads", "3"), "--dim must be a multiple of --heads, but 10 is none of 3"),
        (("--seed", "-1"), "--seed must be"),
        (("--learning-rate", "0"), "--learning-rate must be above 0"),
        (("--learning-rate", "fast"), "--learning-rate must be a number"),
        (("--output", "/proc/model"), "--output"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    tmp_path: Path, log: Path, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "m"
    assert cli.main(["train", "--data", str(log), "--output", str(output), *options]) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1
    assert not output.exists()


def test_nothing_is_overwritten(tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("x")
    assert cli.main(["train", "--data", str(log), "--output", str(tmp_path)]) == 2
    assert "must be a new or empty directory" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_the_usual_log_is_movielens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("USERKV_DATA", str(tmp_path))
    assert cli.main(["train", "--output", str(tmp_path / "m")]) == 2
    assert str(tmp_path / "movielens-latest-small") in capsys.readouterr().err

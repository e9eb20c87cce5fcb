"""What a ranking model says about itself in its directory, and how requests become its prompts.

``config.json`` has a section ``userkv_ranking``::

    {
      "candidate_offset": 9740,                       or "candidate_marker": 3
      "items": {"kind": "table", "reserved": 16},     or {"kind": "codec", "base": 512, "digits": 2, "reserved": 16}
      "score": "head",                                or "logprob", or "label"
      "tasks": ["click", "like"], "task_weights": [1.0, 0.5]
      "max_history_tokens": 256, "max_item_tokens": 1 (both optional)
      "history_window": {"max_items": 256, "drop_items": 64} (optional: cut longer histories instead of refusing them)
    }

With items of kind ``table``, ``items.json`` beside it lists the catalogue's item ids: the one at index ``i`` is the
token ``reserved + i``. With ``codec``, any integer below the code's capacity is an item (``item_codec.py``). In both
cases a list of tokens stands for itself (a semantic id).

``label`` is for a stock decoder that is no ranking model at all: the score of a candidate, which is one token, is its
log-probability after the history. Such a section has neither ``candidate_offset`` nor ``candidate_marker``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from userkv.core.errors import InvalidSettingError, InvalidUserRequestError
from userkv.ranking.config_keys import CONFIG_KEY, ITEMS_FILE
from userkv.ranking.history_window import HistoryWindow
from userkv.ranking.item_codec import DEFAULT_RESERVED, ItemCodec
from userkv.ranking.item_tokens import ItemTokens, ItemVocabulary, join, lay_out
from userkv.ranking.prompt import MAX_ITEM_TOKENS, RankingFormat, RankingPrompt

Item = int | Sequence[int]
"""An item id, or the item's tokens."""

SCORES = ("head", "logprob", "label")


@dataclass(frozen=True, slots=True)
class ItemTable:
    """A catalogue: one token per item.

    Attributes:
        reserved: tokens below the first item's.
        index: item id -> place in the catalogue.

    """

    reserved: int
    index: Mapping[int, int]

    @classmethod
    def load(cls, path: Path, reserved: int) -> "ItemTable":
        """Read ``items.json``.

        Raises:
            InvalidSettingError: it is missing or no list of different integers.

        """
        try:
            ids = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidSettingError(f"the model's item table {path} cannot be read: {error}") from error
        if not isinstance(ids, list) or any(type(item) is not int for item in ids) or len(set(ids)) != len(ids):
            raise InvalidSettingError(f"{path} must be a list of different integers")
        return cls(reserved, {item: place for place, item in enumerate(ids)})

    def tokens(self, item: int) -> Sequence[int]:
        place = self.index.get(item)
        if place is None:
            raise InvalidUserRequestError(f"item {item} is not in the model's catalogue; leave it out or train with it")
        return (self.reserved + place,)

    def tokens_of_all(self, items: Sequence[int]) -> list[int]:
        try:
            places = list(map(self.index.__getitem__, items))
        except KeyError as unknown:
            self.tokens(unknown.args[0])
            raise
        return [self.reserved + place for place in places]


@dataclass(frozen=True, slots=True)
class ItemCode:
    """Items as digits: see :class:`ItemCodec`."""

    codec: ItemCodec

    def tokens(self, item: int) -> Sequence[int]:
        try:
            return self.codec.encode(item)
        except InvalidSettingError as error:
            raise InvalidUserRequestError(str(error)) from None

    def tokens_of_all(self, items: Sequence[int]) -> list[int]:
        try:
            return self.codec.encode_many(items)
        except InvalidSettingError as error:
            raise InvalidUserRequestError(str(error)) from None


def ranking_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section ``userkv_ranking`` of ``config.json``.

    Raises:
        InvalidSettingError: there is none.

    """
    section = config.get(CONFIG_KEY)
    if not isinstance(section, Mapping):
        raise InvalidSettingError(f"the model's config.json has no section {CONFIG_KEY!r}: it is no ranking model")
    return section


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a model's scores are. Attributes: see :class:`RankingSpec`."""

    score: str
    tasks: tuple[str, ...]
    task_weights: tuple[float, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Scoring":
        """From ``config.json``.

        Raises:
            InvalidSettingError: the section is missing or wrong.

        """
        section = ranking_section(config)
        score = section.get("score", "head")
        if score not in SCORES:
            raise InvalidSettingError(f"{CONFIG_KEY}: score must be one of {', '.join(SCORES)}, not {score!r}")
        tasks = tuple(section.get("tasks") or config.get("tasks") or ("score",))
        weights = tuple(section.get("task_weights") or config.get("task_weights") or (1.0,) * len(tasks))
        if len(tasks) != len(weights):
            raise InvalidSettingError(f"{CONFIG_KEY}: {len(tasks)} tasks and {len(weights)} task_weights")
        if any(type(weight) not in (int, float) for weight in weights):
            raise InvalidSettingError(f"{CONFIG_KEY}: task_weights must be numbers, not {list(weights)}")
        if score != "head" and len(tasks) != 1:
            raise InvalidSettingError(f"{CONFIG_KEY}: a log-probability is one task, not {len(tasks)}")
        return cls(score, tasks, tuple(float(weight) for weight in weights))


@dataclass(frozen=True, slots=True)
class RankingSpec:
    """How a model ranks. Thread-safe: nothing changes.

    Attributes:
        format: how candidates begin; ``None`` if they are labels, which are in no prompt.
        items: from item ids to tokens.
        vocab_size: all tokens are below it.
        score: ``head`` (a learned head per task), ``logprob`` (of the candidate's tokens) or ``label``.
        tasks: names of the heads.
        task_weights: the score is the sum of the tasks' probabilities with these weights.
        max_history_tokens: longest history; ``None``: what fits into the engine.
        max_item_tokens: tokens of the longest item.
        history_window: how the server cuts longer histories; ``None``: it refuses them.

    """

    format: RankingFormat | None
    items: ItemVocabulary
    vocab_size: int
    score: str = "head"
    tasks: tuple[str, ...] = ("score",)
    task_weights: tuple[float, ...] = field(default=(1.0,))
    max_history_tokens: int | None = None
    max_item_tokens: int = MAX_ITEM_TOKENS
    history_window: HistoryWindow | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], directory: Path | None = None) -> "RankingSpec":
        """From ``config.json``, and the directory where it lies.

        Raises:
            InvalidSettingError: this is no ranking model, or its section is wrong.

        """
        section = ranking_section(config)
        scoring = Scoring.from_config(config)
        form = RankingFormat.from_config(section) if scoring.score != "label" else None
        vocab_size = _count("vocab_size", config.get("vocab_size"))
        if form is not None and form.candidate_offset is not None and vocab_size < 2 * form.candidate_offset:
            raise InvalidSettingError(
                f"{CONFIG_KEY}: with candidate_offset {form.candidate_offset} there are {2 * form.candidate_offset} "
                f"tokens, but vocab_size is {vocab_size}"
            )
        longest = section.get("max_history_tokens", config.get("max_sequence_length"))
        widest = section.get("max_item_tokens", config.get("max_item_tokens"))
        return cls(
            form,
            _vocabulary(section.get("items") or {}, directory),
            vocab_size,
            scoring.score,
            scoring.tasks,
            scoring.task_weights,
            None if longest is None else _count("max_history_tokens", longest),
            MAX_ITEM_TOKENS if widest is None else _count("max_item_tokens", widest),
            _window(section.get("history_window")),
        )

    def tokens(self, item: Item) -> list[int]:
        """An item's tokens, checked.

        Raises:
            InvalidUserRequestError: there is no such item.

        """
        if isinstance(item, bool | str | bytes) or not isinstance(item, int | Sequence):
            raise InvalidUserRequestError(f"an item is an integer or a list of tokens, not {item!r}")
        tokens = list(self.items.tokens(item)) if isinstance(item, int) else list(item)
        if not tokens or any(type(token) is not int or not 0 <= token < self.vocab_size for token in tokens):
            raise InvalidUserRequestError(f"item {item!r} must be tokens from 0 to {self.vocab_size - 1}, at least one")
        if len(tokens) > self.max_item_tokens:
            raise InvalidUserRequestError(f"item {item!r} has more than the model's {self.max_item_tokens} tokens")
        if self.format is not None and len(self.format.starts(tokens)):
            raise InvalidUserRequestError(f"item {item!r} has a token that is reserved for the start of a candidate")
        return tokens

    def prompt(self, history: Sequence[Item], candidates: Sequence[Item]) -> RankingPrompt:
        """The prompt of a request; for labels, the history alone.

        Raises:
            InvalidUserRequestError: an item is unknown, or the history is too long for the model.

        """
        before = self._laid_out(history).tokens
        history_len = len(before)
        if self.max_history_tokens is not None and history_len > self.max_history_tokens:
            raise InvalidUserRequestError(
                f"the history has {history_len} tokens and the model takes {self.max_history_tokens}; send the last "
                "items only, cut with HistoryWindow so that the prefix stays the same"
            )
        after = self._laid_out(candidates)
        if self.format is not None:
            token_ids = np.concatenate((before, after.as_candidates(self.format)))
            return RankingPrompt(token_ids.tolist(), history_len, len(candidates))
        for item, length in zip(candidates, after.lengths, strict=True):
            if length != 1:
                raise InvalidUserRequestError(f"candidate {item!r} has {length} tokens; a label is one token")
        return RankingPrompt(before.tolist(), history_len, len(candidates))

    def _laid_out(self, items: Sequence[Item]) -> ItemTokens:
        """The tokens of items, checked all at once, and one by one only to say what is wrong."""
        found = lay_out(items, self.items)
        if found is None or not self._may_be_used(found):
            found = join([self.tokens(item) for item in items])
            assert found is not None
        return found

    def _may_be_used(self, items: ItemTokens) -> bool:
        """Whether :meth:`tokens` would take all of them."""
        if not len(items.lengths):
            return True
        return bool(
            items.lengths.min() >= 1
            and items.lengths.max() <= self.max_item_tokens
            and items.tokens.min() >= 0
            and items.tokens.max() < self.vocab_size
            and not (self.format is not None and self.format.is_start(items.tokens).any())
        )


def load_spec(directory: Path) -> RankingSpec:
    """The spec of a model's directory.

    Raises:
        InvalidSettingError: there is no ranking model.

    """
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidSettingError(f"{directory} is no model's directory: {error}") from error
    if not isinstance(config, Mapping):
        raise InvalidSettingError(f"{directory} is no model's directory: its config.json is no JSON object")
    return RankingSpec.from_config(config, directory)


def _window(section: Any) -> HistoryWindow | None:
    if section is None:
        return None
    if not isinstance(section, Mapping) or section.keys() != {"max_items", "drop_items"}:
        raise InvalidSettingError(f"{CONFIG_KEY}: history_window must have max_items and drop_items")
    return HistoryWindow(section["max_items"], section["drop_items"])


def _vocabulary(section: Mapping[str, Any], directory: Path | None) -> ItemVocabulary:
    if not isinstance(section, Mapping):
        raise InvalidSettingError(f"{CONFIG_KEY}: items must be a JSON object, not {section!r}")
    reserved = _count("items.reserved", section.get("reserved", DEFAULT_RESERVED), 0)
    match section.get("kind"):
        case "codec":
            base, digits = (_count(f"items.{name}", section.get(name)) for name in ("base", "digits"))
            return ItemCode(ItemCodec(base, digits, reserved))
        case "table":
            if directory is None:
                raise InvalidSettingError(f"{CONFIG_KEY}: items of kind 'table' need a local model directory")
            return ItemTable.load(directory / ITEMS_FILE, reserved)
        case kind:
            raise InvalidSettingError(f"{CONFIG_KEY}: items.kind must be 'codec' or 'table', not {kind!r}")


def _count(name: str, value: object, minimum: int = 1) -> int:
    if type(value) is not int or value < minimum:
        raise InvalidSettingError(
            f"the model's config.json: {name} must be a whole number of at least {minimum}, not {value!r}"
        )
    return value

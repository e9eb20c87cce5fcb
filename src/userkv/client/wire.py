"""What goes over the wire of ``/v1/rank``: one definition for the server, its OpenAPI document and the client."""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from userkv.core.request import MAX_USER_ID_BYTES

Item = int | list[int]
"""An item id, or the item's tokens (a semantic id)."""

_ITEMS = "Each is an integer of the model's catalogue, or a list of tokens, which stands for itself."


class RankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A user's history, and the candidates to score for him."""

    user_id: Annotated[
        str,
        Meta(
            description=f"Whose history this is: any name of 1 to {MAX_USER_ID_BYTES} bytes of UTF-8. "
            "What was computed of the history is kept under it.",
            examples=["user-1"],
            extra_json_schema={"minLength": 1, "maxLength": MAX_USER_ID_BYTES},
        ),
    ]
    history: Annotated[
        list[Item],
        Meta(description=f"The items of the user's history, oldest first. {_ITEMS}", examples=[[17, 4, 256]]),
    ]
    candidates: Annotated[
        list[Item],
        Meta(
            description=f"The items to score, at least one; none with stage 'prefill'. {_ITEMS} Duplicates are fine.",
            examples=[[31, 5, 99, 12]],
        ),
    ] = []
    model: Annotated[
        str | None, Meta(description="Name of the served model; left out: the one that is served.", examples=["userkv"])
    ] = None
    top_k: Annotated[int, Meta(ge=1, description="Length of the ranking; left out: all candidates.")] | None = None
    stage: Annotated[
        str,
        Meta(
            description="'rank' scores the candidates; 'prefill' computes and keeps the history ahead of time (the "
            "user has opened the app) and returns no scores.",
            extra_json_schema={"enum": ["rank", "prefill"]},
        ),
    ] = "rank"
    weights_version: Annotated[
        str | None, Meta(description="Refuse with HTTP 409 unless the server has this version of the weights.")
    ] = None


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate's score."""

    item: Annotated[Item, Meta(description="The candidate, as it was sent.", examples=[31])]
    score: Annotated[
        float, Meta(description="Higher is better. With several tasks: their sum, times the weights.", examples=[0.81])
    ]
    tasks: Annotated[
        dict[str, float] | None,
        Meta(description="Each task's number; only from models with several.", examples=[{"click": 0.7, "like": 0.2}]),
    ] = None


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """History tokens that did not have to be computed, by where they were kept."""

    hbm: Annotated[int, Meta(description="In the engine's own KV cache.", examples=[200])]
    dram: Annotated[int, Meta(description="In the pool's memory.", examples=[0])]
    ssd: Annotated[int, Meta(description="In the pool's files.", examples=[0])]
    total: Annotated[int, Meta(description="The sum.", examples=[200])]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the request was made of."""

    history_tokens: Annotated[int, Meta(description="Tokens of the history, once it was cut.", examples=[201])]
    cached_tokens: CachedTokens
    candidate_tokens: Annotated[int, Meta(description="Tokens of all candidates.", examples=[4])]
    history_items_dropped: Annotated[
        int, Meta(description="Oldest items that the server left out, since the history is longer than its window.")
    ] = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in milliseconds; the network is not in it."""

    total_ms: Annotated[float, Meta(description="From the body's arrival to the answer.", examples=[9.5])]
    prepare_ms: Annotated[float, Meta(description="Of it, checks and the prompt.", examples=[0.9])]
    engine_ms: Annotated[float, Meta(description="Of it, in the engine, waiting included.", examples=[8.2])]


@dataclass(frozen=True, slots=True)
class RankResult:
    """The answer to a request."""

    id: Annotated[str, Meta(description="Of the request; the header X-Request-Id sets it.", examples=["rank-5f1c"])]
    model: Annotated[str, Meta(description="Name of the model.", examples=["userkv"])]
    scores: Annotated[
        tuple[Score, ...], Meta(description="One per candidate, in their order; none with stage 'prefill'.")
    ]
    ranking: Annotated[
        tuple[Item, ...],
        Meta(
            description="The candidates, best first, at most top_k; of equal scores, the one that was sent first.",
            examples=[[31, 99]],
        ),
    ]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What the served ranking model takes."""

    model: Annotated[str, Meta(description="Name of the model.", examples=["userkv"])]
    score: Annotated[
        str,
        Meta(
            description="What a score is: 'head' (learned heads), 'logprob' (log-probability of the candidate's "
            "tokens) or 'label' (of its one token after the history).",
            examples=["head"],
        ),
    ]
    tasks: Annotated[tuple[str, ...], Meta(description="Names of the tasks.", examples=[["click", "like"]])]
    task_weights: Annotated[tuple[float, ...], Meta(description="Their weights in the score.", examples=[[1.0, 0.5]])]
    items: Annotated[
        dict[str, str | int],
        Meta(
            description="Which integers are items: kind 'table' (a catalogue of count items) or 'codec' (0 to "
            "capacity - 1, as digits tokens to the base base, from token reserved on).",
            examples=[{"kind": "table", "count": 9724}],
        ),
    ]
    item_vocab_size: Annotated[int, Meta(description="Tokens of items are below this.", examples=[9740])]
    max_model_len: Annotated[int, Meta(description="Longest prompt: tokens of history and candidates.")]
    max_history_tokens: Annotated[int | None, Meta(description="Longest history; null: what fits.")] = None
    max_item_tokens: Annotated[int, Meta(description="Tokens of the longest item.", examples=[2])] = 32
    history_window: Annotated[
        dict[str, int] | None, Meta(description="How the server cuts longer histories, in items; null: it does not.")
    ] = None
    weights_version: Annotated[str, Meta(description="Version of the weights.", examples=["default"])] = "default"


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """Why a request was refused."""

    message: Annotated[str, Meta(description="One sentence that says what to change.")]
    type: Annotated[str, Meta(description="Kind of the error.", examples=["BadRequestError"])]
    code: Annotated[int, Meta(description="The HTTP status.", examples=[400])]
    param: Annotated[str | None, Meta(description="The field that is wrong, where it is known.")] = None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An error, in the format of OpenAI's API."""

    error: ErrorDetail = field()

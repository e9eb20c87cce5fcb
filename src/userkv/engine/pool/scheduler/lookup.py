"""What one request asks the pool, and what the pool answers."""

from dataclasses import dataclass

from userkv.core.tokens import TokenArray, common_prefix
from userkv.engine.pool.scheduler.lookup_state import LOOKUP_TRANSITIONS, LookupEvent, LookupState
from userkv.engine.pool.scheduler.pool_client import PoolClient, PoolLookupResult
from userkv.records.load_plan import ExtentRead, plan_load

ANSWER_SECONDS = 5.0
"""How long an answer about a waiting request is trusted; Mooncake's leases, which keep its extents there, last 10 s."""

MAX_QUESTIONS = 4
"""How often a request asks because its user was saved meanwhile, at most."""


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """The pool's answer, compared with the request's history.

    Attributes:
        result: what the pool said.
        common: how many of the history's tokens the pool can load.
        reads: how to load all of them.

    """

    result: PoolLookupResult
    common: int
    reads: tuple[ExtentRead, ...]


class PoolLookup:
    """The look-up of one request. Scheduler thread only: another thread delivers the answer, :attr:`answer` takes it.

    Attributes:
        state: where it stands.
        asked_at: when the pool was asked last, in the caller's seconds.
        num_questions: how often it was asked under the present weights.

    """

    def __init__(self) -> None:
        self.state = LookupState.NOT_ASKED
        self.asked_at = 0.0
        self.num_questions = 0
        self._question: object = None
        self._delivered: tuple[object, LookupAnswer] | None = None

    @property
    def answer(self) -> LookupAnswer | None:
        """The answer to the last question; ``None`` before it arrives."""
        delivered = self._delivered
        # A late answer to an earlier question does not count.
        if delivered is None or delivered[0] is not self._question:
            return None
        if self.state is LookupState.ASKED:
            self._advance(LookupEvent.ANSWER)
        return delivered[1]

    def ask(self, pool: PoolClient, user: tuple[str, str], history: TokenArray, block_size: int, now: float) -> None:
        """Ask the pool for a user; until it answers, there is no :attr:`answer`.

        Args:
            pool: the pool.
            user: the user's name there, and the namespace of its KV.
            history: the request's history.
            block_size: tokens per block.
            now: becomes ``asked_at``.

        """
        self._advance(LookupEvent.ASK)
        self.asked_at = now
        self.num_questions += 1
        self._question = question = object()

        def deliver(result: PoolLookupResult) -> None:
            """Plan the load beside the scheduler: on the RPC client's thread."""
            usable = result.usable
            common = 0 if usable is None else common_prefix(usable.tokens, history)
            reads = () if usable is None else plan_load(usable, 0, -(-common // block_size))
            if self._question is question:
                self._delivered = question, LookupAnswer(result, common, reads)

        pool.lookup(*user, deliver, is_new_request=self.num_questions == 1)

    def must_ask(self, now: float) -> bool:
        """Whether there is neither an open question nor an answer that can still be trusted."""
        if self.answer is None:
            return self.state is LookupState.NOT_ASKED
        # Again once only, or a request would ask for ever where steps take longer than that.
        return now - self.asked_at > ANSWER_SECONDS and self.num_questions == 1

    def void(self) -> None:
        """Forget what the pool has said: it was about KV of other weights."""
        self._advance(LookupEvent.VOID)
        self.num_questions = 0
        self._question = None

    def start_load(self) -> None:
        """What the answer names is being loaded."""
        self._advance(LookupEvent.LOAD)

    def end_load(self, ok: bool) -> None:
        """All ranks have loaded, or one has failed."""
        self._advance(LookupEvent.LOAD_DONE if ok else LookupEvent.LOAD_FAILED)

    def _advance(self, event: LookupEvent) -> None:
        self.state = LOOKUP_TRANSITIONS.next(self.state, event)

"""One save: a history whose KV is in HBM, on its way to a record in the pool."""

import time
from dataclasses import dataclass, field
from typing import Any

from userkv.core.request import UserKey
from userkv.core.tokens import TokenArray
from userkv.engine.pool.scheduler.save_state import SaveState
from userkv.engine.pool.wire.messages import SaveJob
from userkv.records.save_plan import SavePlan


@dataclass(frozen=True, slots=True)
class History:
    """A history whose KV is in HBM.

    Attributes:
        key: the user's key in the table of HBM.
        uid: the user's name in the pool.
        namespace: model and weights that computed the KV.
        tokens: the history.
        blocks: vLLM's blocks that hold it, in order.

    """

    key: UserKey
    uid: str
    namespace: str
    tokens: TokenArray
    blocks: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Save:
    """One save. Its fields change under the lock of :class:`PoolSaves`.

    Attributes:
        job_id: names the save, and its job, in reports.
        history: what is saved.
        during_forward: whether it is written layer by layer while the step computes.
        state: where it stands.
        plan: what is written, once that is known.
        base_generation: generation of the record that the plan extends; 0 without one.
        held: blocks on which the save holds a reference each.
        started_at: monotonic seconds.
        ranks_left: ranks that have not reported the job.

    """

    job_id: int
    history: History
    during_forward: bool
    state: SaveState = SaveState.LOOKING_UP
    plan: SavePlan | None = None
    base_generation: int = 0
    held: tuple[Any, ...] = ()
    started_at: float = field(default_factory=time.monotonic)
    ranks_left: int = 0

    @property
    def user(self) -> tuple[str, str]:
        """The user's name in the pool, and the namespace of its KV."""
        return self.history.uid, self.history.namespace

    def make_job(self, plan: SavePlan, block_size: int) -> SaveJob:
        """The job for the workers; ``held`` must begin with the first block that ``plan`` writes."""
        first = plan.new_extents[0].first_block
        block_ids = [block.block_id for block in self.held]
        is_partial = len(self.history.tokens) % block_size != 0
        return SaveJob(
            self.job_id,
            *self.user,
            tuple(
                (extent, tuple(block_ids[extent.first_block - first : extent.end_block - first]))
                for extent in plan.new_extents
            ),
            live_block=block_ids[-1] if is_partial or self.during_forward else -1,
            during_forward=self.during_forward,
        )

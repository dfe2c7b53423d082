"""What one tick says of each unit, and where units are: the inputs of hints.

Here belong the shapes that forecasters hand over and the look-up of places that hints go by. A unit is what a class is
told of: a GPU, a link, a node or a queue. What becomes of alarms stands in `watches.py`, `causes.py` and `episodes.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from features.windows import FeatureBlock
from scheduler_hints.schema import BottleneckClass

Unit = Literal["gpu", "link", "node", "queue"]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one class at one tick.

    Attributes:
        bottleneck_class: The class.
        block: Features of the GPUs that were looked at; its `gpus` say which. None where units are no GPUs.
        probabilities: Shape (rows, len(HORIZONS_S)).
        is_active: The condition is set already, shape (rows,).
        model_version: Of the forecaster.
        unit: What a row is about.
        names: Name of each row's unit where it is no GPU, lasting from tick to tick: node, queue, `node/device/port`.
        nodes: Node of each row's unit, where it is a link.
        jobs: Jobs of each row's unit, where the place does not tell them (queues).
        sampled_s: Moment of each row's newest sample, seconds since 1970; None: from the block, else now.
        reasons: Why, in words, of each row; empty: from the block.
    """

    bottleneck_class: BottleneckClass
    block: FeatureBlock | None
    probabilities: NDArray[np.float64]
    is_active: NDArray[np.bool_]
    model_version: str
    unit: Unit = "gpu"
    names: Sequence[str] = ()
    nodes: Sequence[str] = ()
    jobs: Sequence[Sequence[str]] = ()
    sampled_s: NDArray[np.float64] | None = None
    reasons: Sequence[str] = ()

    def highest(self) -> NDArray[np.float64]:
        """P within the last horizon, 1 where the condition is set, shape (rows,)."""
        return np.where(self.is_active, 1.0, self.probabilities[:, -1])

    def moments_s(self, now_s: float) -> NDArray[np.float64]:
        """Moment of each row's newest sample, seconds since 1970, shape (rows,)."""
        if self.sampled_s is not None:
            return self.sampled_s
        if self.block is None:
            return np.full(len(self.probabilities), now_s)
        return self.block.at_s - np.nan_to_num(self.block.column("data_age_s")).astype(np.float64)


class Place(Protocol):
    """Where a unit is, whose it is, and what else is there."""

    def uuid(self, gpu: int) -> str:
        """UUID of a GPU."""
        ...

    def node(self, gpu: int) -> str:
        """Node of a GPU."""
        ...

    def jobs(self, gpu: int) -> Sequence[str]:
        """Jobs of a GPU."""
        ...

    def node_jobs(self, node: str) -> Sequence[str]:
        """Jobs of a node."""
        ...

    def node_gpus(self, node: str) -> int:
        """GPUs of a node."""
        ...

    def rack(self, node: str) -> str | None:
        """Rack of a node, where it is known."""
        ...

    def pod(self, node: str) -> str | None:
        """Pod of a node, where it is known."""
        ...

    def is_excluded(self, node: str) -> bool:
        """The node is out of service: nobody should be told anything of it."""
        ...

    def sampled_s(self, uuid: str) -> float | None:
        """Moment of the newest sample of a GPU; None where it is stale or the GPU is gone."""
        ...

    def gpus_at_work(self, kind: str, key: str) -> int:
        """GPUs with a job and a fresh sample on a `node`, in a `rack`, `pod`, of a `job` or in the `cluster`."""
        ...

    def nodes_up(self, kind: str, key: str) -> int:
        """Nodes with a fresh sample, as `gpus_at_work`."""
        ...

    def parts(self, kind: str, key: str) -> int:
        """Nodes with a fresh sample of a rack or job, racks of a pod, pods of the cluster; what is known of these."""
        ...

    def air_excess_k(self, kind: str, key: str) -> float | None:
        """How much warmer the inlet air of a rack or pod is than elsewhere in the cluster, K; None: not known."""
        ...


@dataclass(slots=True, eq=False)
class Alarm:
    """A unit that is in trouble or about to be, as it was last looked at.

    Attributes:
        key: Lasting name of the unit.
        node: Its node; None for a queue.
        jobs: Its jobs.
        scored: Where it was last looked at.
        row: Its row there.
        looked_s: When, seconds since 1970.
        since_s: Since when it has been an alarm.
    """

    key: str
    node: str | None
    jobs: tuple[str, ...]
    scored: Scored
    row: int
    looked_s: float
    since_s: float

    @property
    def unit(self) -> Unit:
        """What kind of unit it is."""
        return self.scored.unit

    @property
    def is_active(self) -> bool:
        """The condition is set."""
        return bool(self.scored.is_active[self.row])

    @property
    def highest(self) -> float:
        """P within the last horizon, 1 where the condition is set."""
        return 1.0 if self.is_active else float(self.scored.probabilities[self.row, -1])

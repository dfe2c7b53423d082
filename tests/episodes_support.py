"""Made-up scores and places for tests of hints: racks of four nodes of eight GPUs, eight racks a pod."""

from functools import cache

import numpy as np

from features.windows import FEATURE_INDEX, FEATURES, FeatureBlock
from scheduler_hints.scored import Scored
from tests.gpu_samples import at

THERMAL, LINKS, MEMORY = "thermal_throttle", "nvlink_saturation", "memory_exhaustion"


class Town:
    """A cluster of whole nodes whose GPUs all have fresh samples, but for those that are silent."""

    def __init__(self, nodes=64, *, job_of=None, has_racks=True, has_pods=True, air=None):
        self.size, self.job_of, self.has_racks, self.has_pods = nodes, job_of or (lambda gpu: "7"), has_racks, has_pods
        self.air, self.now_s, self.silent, self.excluded = air or {}, 0.0, set(), set()

    def uuid(self, gpu):
        return f"GPU-{gpu:05d}"

    def node(self, gpu):
        return f"n{gpu // 8}"

    def jobs(self, gpu):
        job = self.job_of(gpu)
        return [] if job is None else [job]

    def node_jobs(self, node):
        return sorted({job for gpu in self._of("node", node) for job in self.jobs(gpu)})

    def node_gpus(self, node):
        return 8

    def rack(self, node):
        return f"r{int(node[1:]) // 4}" if self.has_racks else None

    def pod(self, node):
        return f"p{int(node[1:]) // 32}" if self.has_pods else None

    def is_excluded(self, node):
        return node in self.excluded

    def sampled_s(self, uuid):
        return None if uuid in self.silent else self.now_s

    @cache  # noqa: B019
    def _of(self, kind, key):
        keys = {"node": self.node, "rack": lambda g: self.rack(self.node(g)), "pod": lambda g: self.pod(self.node(g)),
                "job": self.job_of, "cluster": lambda g: "c"}  # fmt: skip
        return [gpu for gpu in range(8 * self.size) if keys[kind](gpu) == key or kind == "cluster"]

    @cache  # noqa: B019
    def gpus_at_work(self, kind, key):
        there = self._of(kind, key)
        return len([gpu for gpu in there if self.job_of(gpu) is not None]) or len(there)

    @cache  # noqa: B019
    def nodes_up(self, kind, key):
        return len({self.node(gpu) for gpu in self._of(kind, key)})

    @cache  # noqa: B019
    def parts(self, kind, key):
        of = {"cluster": self.pod, "pod": self.rack}.get(kind, lambda node: node)
        return len({of(self.node(gpu)) for gpu in self._of(kind, key)})

    def air_excess_k(self, kind, key):
        return self.air.get(key)


class Clock:
    """Feeds episodes tick by tick, each GPU with a fresh sample at every tick but the silent ones."""

    def __init__(self, episodes, town, *, tick_s=15, name=THERMAL):
        self.episodes, self.town, self.tick_s, self.name, self.second = episodes, town, tick_s, name, 0

    def tick(self, chances, active=()):
        """One tick; `chances` gives P within 120 s by GPU, `active` the GPUs whose condition is set."""
        self.second += self.tick_s
        self.town.now_s = at(self.second).timestamp()
        return self.episodes.update(at(self.second), [scored(self.name, chances, active, self.second)], self.town)


def scored(name, chances, active=(), second=0.0):
    """Scores of some GPUs at a moment: P within 120 s, and smaller by horizon."""
    gpus = np.array(sorted({*chances, *active}), dtype=np.int64)
    matrix = np.full((len(gpus), len(FEATURES)), np.nan, dtype=np.float32)
    matrix[:, FEATURE_INDEX["data_age_s"]] = 0
    matrix[:, FEATURE_INDEX["last"]] = 1
    block = FeatureBlock(name, gpus, np.full(len(gpus), at(second).timestamp()), matrix)
    last = np.array([chances.get(int(gpu), 0.0) for gpu in gpus])
    p = last[:, None] * np.array([0.4, 0.6, 0.8, 1.0])
    return Scored(name, block, p, np.isin(gpus, list(active)), "m")

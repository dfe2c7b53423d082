"""Who submits which jobs and when: users with habits.

A user repeats a few keys (name family, size, limit); runtimes scatter log-normally around the key's median, which
drifts; people work by day and on weekdays, in sessions, with arrays, chains and resubmissions. Nothing here knows
about nodes or clocks of the simulation: it answers "what is submitted on day D" and "is this failed job tried again".
Recorded jobs are read in `trace.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from simulator.hardware import GPUS_PER_NODE
from simulator.jobs import Job, Profile
from simulator.streams import Stream, generator

DAY_S = 86_400
LIMITS_S = tuple(60 * m for m in (15, 30, 60, 120, 240, 360, 480, 720, 1440, 2160, 2880, 4320))
# Sizes as on GPU clusters of AI training: most jobs are one GPU, most GPU time is in whole nodes.
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZE_WEIGHTS = (0.44, 0.10, 0.13, 0.19, 0.07, 0.04, 0.02, 0.006, 0.003, 0.001)
# Shares of all GPU jobs that end cancelled or failed: Helios 2020, 22.1 % and 15.5 %.
P_CANCEL, P_FAIL = 0.221, 0.155
P_RESUBMIT = 0.4
FAMILIES = (
    "llama-ft", "gpt-pretrain", "bert-distil", "vit-large", "sd-train", "asr-conformer", "moe-8x7b", "rlhf-ppo",
    "eval-suite", "tokenize", "clip-train", "t5-xxl", "dpo-7b", "unet3d", "gnn-mol", "recsys-dlrm", "wav2vec",
    "rag-embed",
)  # fmt: skip
ACCOUNTS = ("nlp", "vision", "speech", "science", "recsys", "infra", "robotics", "students")


@dataclass(slots=True)
class Key:
    """One habit of one user."""

    number: int
    user: int
    family: str
    kind: str
    gpus: int
    limit_s: float
    median_s: float
    sigma: float
    p_fail: float
    p_cancel: float
    repeats: float
    array: int
    chain: bool
    numbered: bool
    profile_seed: int
    drift: tuple[float, float, float]


def _round_limit(seconds: float) -> float:
    return next((limit for limit in LIMITS_S if limit >= seconds), LIMITS_S[-1])


class Population:
    """Users and their keys, drawn once from the seed; `submissions(day)` gives one day's jobs in order of time."""

    def __init__(self, seed: int, cluster_gpus: int, load: float) -> None:
        self.seed = seed
        self.cluster_gpus = cluster_gpus
        rng = generator(seed, Stream.USERS)
        count = int(np.clip(2.5 * math.sqrt(cluster_gpus), 6, 600))
        weights = np.minimum(rng.pareto(1.3, count) + 0.2, 5.0)
        self.weights = weights / weights.sum()
        self.users = [f"u{i + 1:03d}" for i in range(count)]
        self.accounts = [ACCOUNTS[i] for i in rng.integers(0, len(ACCOUNTS), count)]
        largest = max(1, cluster_gpus // 2) if cluster_gpus > GPUS_PER_NODE else cluster_gpus
        self.keys: list[list[Key]] = []
        number = 0
        for user in range(count):
            own = []
            for _ in range(int(rng.integers(2, 7))):
                own.append(self._key(rng, number, user, largest))
                number += 1
            self.keys.append(own)
        self._key_of = [key for own in self.keys for key in own]
        self.sessions_per_day = self._calibrate(load)

    def _key(self, rng: np.random.Generator, number: int, user: int, largest: int) -> Key:
        sizes = [(s, w) for s, w in zip(SIZES, SIZE_WEIGHTS, strict=True) if s <= largest]
        weights = np.array([w for _, w in sizes])
        gpus = int(sizes[rng.choice(len(sizes), p=weights / weights.sum())][0])
        kind = str(rng.choice(["train", "serve", "notebook"], p=[0.78, 0.12, 0.10]))
        if kind != "train":
            gpus = min(gpus, 8 if kind == "serve" else 2)
        median = float(np.clip(rng.lognormal(math.log(1500) + 0.25 * math.log(gpus), 1.5), 60, 1.7e5))
        limit = _round_limit(median * float(rng.uniform(1.6, 6)))
        if kind == "notebook":
            median, limit = float(rng.uniform(1800, 18_000)), float(rng.choice([14_400, 28_800]))
        return Key(
            number=number,
            user=user,
            family=f"{rng.choice(FAMILIES)}-{rng.choice(['s', 'm', 'l', 'xl'])}",
            kind=kind,
            gpus=gpus,
            limit_s=limit,
            median_s=median,
            sigma=float(rng.uniform(0.08, 0.8)),
            p_fail=float(np.clip(rng.beta(0.8, 0.8 / P_FAIL - 0.8), 0, 0.9)),
            p_cancel=float(np.clip(rng.beta(1.2, 1.2 / P_CANCEL - 1.2), 0, 0.9)),
            repeats=float(rng.uniform(0.35, 0.9)),
            array=int(rng.choice([0, 4, 8, 16], p=[0.82, 0.08, 0.06, 0.04])) if gpus <= 2 and kind == "train" else 0,
            chain=bool(gpus >= 8 and rng.random() < 0.12),
            numbered=bool(rng.random() < 0.4),
            profile_seed=int(rng.integers(0, 2**31)),
            drift=(float(rng.uniform(8, 60)), float(rng.uniform(0, 2 * math.pi)), float(rng.uniform(0, 0.4))),
        )

    def _calibrate(self, load: float) -> float:
        """Sessions a day that offer `load` of the cluster's GPU time, by drawing sessions that are never run."""
        rng = generator(self.seed, Stream.CALIBRATION)
        draws = 3000
        work = sum(
            job.gpus * min(job.runtime_s, job.limit_s or job.runtime_s) * (1 + P_RESUBMIT * (job.outcome == "FAILED"))
            for _ in range(draws)
            for job in self._session(rng, 0.0, 0)
        )
        return load * self.cluster_gpus * DAY_S / (work / draws)

    def _drift(self, key: Key, day: int) -> float:
        """Factor on the key's median: a slow wave, different for each key."""
        period, phase, size = key.drift
        return math.exp(size * math.sin(2 * math.pi * day / period + phase))

    def _session(self, rng: np.random.Generator, at: float, day: int) -> list[Job]:
        """One user sits down and submits; times relative to `at` are in order."""
        user = int(rng.choice(len(self.users), p=self.weights))
        own = self.keys[user]
        key = own[min(int(rng.geometric(0.45)) - 1, len(own) - 1)]
        median = key.median_s * self._drift(key, day)
        jobs: list[Job] = []
        count = min(int(rng.geometric(1 - key.repeats)), 12)
        run = int(rng.integers(1, 1000))
        time = at
        for repeat in range(count):
            tasks = key.array or 1
            for task in range(tasks):
                job = self._job(rng, key, median, time, run + repeat)
                if key.array:
                    job.array_id, job.array_task = repeat, task
                if key.chain and jobs:
                    job.after = jobs[-1]
                jobs.append(job)
            time += float(rng.exponential(20 if key.chain else 400)) + 1
        return jobs

    def _job(self, rng: np.random.Generator, key: Key, median: float, submit: float, run: int) -> Job:
        natural = float(np.clip(median * rng.lognormal(0, key.sigma), 20, 6e5))
        draw = float(rng.random())
        outcome, gives_up = "COMPLETED", None
        if draw < key.p_fail:
            outcome = "FAILED"
            natural = float(rng.uniform(15, 300)) if rng.random() < 0.6 else natural * float(rng.uniform(0.05, 1))
        elif draw < key.p_fail + key.p_cancel:
            outcome = "CANCELLED"
            natural *= float(rng.uniform(0.05, 1.3))
            if rng.random() < 0.25:
                gives_up = submit + float(rng.exponential(7200))
        nodes = max(1, key.gpus // GPUS_PER_NODE)
        per_node = min(key.gpus, GPUS_PER_NODE)
        return Job(
            id=0,
            user=self.users[key.user],
            account=self.accounts[key.user],
            queue="large" if nodes >= 4 else "interactive" if key.kind == "notebook" else "batch",
            name=f"{key.family}-r{run}" if key.numbered else key.family,
            submit=math.floor(submit),
            nodes=nodes,
            per_node=per_node,
            limit_s=key.limit_s,
            runtime_s=max(5.0, math.floor(natural)),
            outcome=outcome,
            cpus=12 * key.gpus,
            memory_mib=key.gpus * 131_072,
            habit=(key.kind, key.gpus, key.profile_seed, int(rng.integers(0, 2**31))),
            gives_up_at=gives_up,
            priority=1 if nodes >= 4 else 2 if key.kind == "notebook" else 0,
            key=key.number,
        )

    def key_of(self, job: Job) -> Key:
        """The habit that a drawn job comes from."""
        return self._key_of[job.key]

    def submissions(self, day: int) -> list[Job]:
        """Jobs submitted on day `day` since the epoch, in order of submission; ids are not set.

        A session that starts late may run past midnight; its jobs keep their own times.
        """
        rng = generator(self.seed, Stream.DAY, day)
        weekday = (day + 3) % 7  # day 0 was a Thursday
        share = 0.7 if weekday >= 5 else 1.12
        jobs: list[Job] = []
        for number in range(int(rng.poisson(self.sessions_per_day * share))):
            while True:
                hour = rng.uniform(0, 24)
                if rng.random() * 1.5 < 1 + 0.5 * math.cos((hour - 14) / 12 * math.pi):
                    break
            session = self._session(rng, day * DAY_S + hour * 3600, day)
            for job in session:
                if job.array_id is not None:
                    job.array_id += number * 100
            jobs += session
        jobs.sort(key=lambda job: job.submit)
        return jobs

    def resubmission(self, job: Job, at: float) -> Job | None:
        """The job that its user submits again after `job` failed at time `at`, or None."""
        rng = generator(self.seed, Stream.JOB, job.id)
        again = 0.8 if job.state == "NODE_FAIL" else P_RESUBMIT
        if job.key < 0 or rng.random() > again:
            return None
        key = self._key_of[job.key]
        median = key.median_s * self._drift(key, int(at // DAY_S))
        return self._job(rng, key, median, at + float(rng.exponential(240)) + 5, int(rng.integers(1, 1000)))


def draw_profile(kind: str, gpus: int, habit: int, seed: int) -> Profile:
    """How a job of a kind and size works; jobs of one habit resemble one another.

    Args:
        kind: train, serve or notebook.
        gpus: GPUs of the job; one GPU has no collectives.
        habit: Seed of what the habit fixes (model, step).
        seed: Seed of what differs from run to run.
    """
    fixed, free = np.random.default_rng(habit), np.random.default_rng(seed)
    compute = float(np.clip(fixed.lognormal(math.log(1.2), 0.8), 0.3, 12))
    profile = Profile(
        kind=kind,
        compute_s=compute,
        link_s=compute * float(fixed.uniform(0.25, 0.7)) if gpus > 1 else 0.0,
        exposed_ratio=float(fixed.uniform(0.08, 0.25)),
        link_efficiency=float(fixed.uniform(0.955, 0.985)),
        power_ratio=float(fixed.uniform(0.72, 1.06)),
        sm_ratio=float(fixed.uniform(0.7, 0.95)),
        tensor_ratio=float(fixed.uniform(0.2, 0.6)),
        dram_ratio=float(fixed.uniform(0.25, 0.65)),
        memory_ratio=float(np.clip(fixed.uniform(0.75, 0.955) + free.normal(0, 0.003), 0.7, 0.958)),
        warmup_s=float(free.uniform(40, 240)),
        pause_every_s=float(fixed.choice([600, 900, 1800, 3600])) * float(free.uniform(0.95, 1.05)),
        pause_s=float(fixed.uniform(8, 45)),
        eval_every_s=float(fixed.choice([1200, 2400, 5400])) * float(free.uniform(0.95, 1.05)),
        eval_s=float(fixed.uniform(30, 150)),
        burst_s=float(fixed.uniform(3, 7)) if gpus > 1 else 0.0,
        phase=float(free.random()),
        reports_steps=bool(fixed.random() < 0.85),
    )
    if kind != "train":
        profile.link_s, profile.burst_s, profile.reports_steps, profile.eval_s = 0.0, 0.0, False, 0.0
        profile.power_ratio = float(fixed.uniform(0.35, 0.8))
    if kind == "notebook":  # a person thinks most of the time
        profile.pause_every_s, profile.memory_ratio = float(free.uniform(400, 1500)), float(fixed.uniform(0.2, 0.7))
        profile.pause_s = profile.pause_every_s * float(free.uniform(0.6, 0.9))
    return profile

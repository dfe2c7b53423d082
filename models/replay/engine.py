"""The event loop of a replay: jobs arrive, wait, start under a policy and end; all in one compiled function.

Here belongs what happens when; which policies there are and how a replay is asked for stands in `policies.py`, scores
in `scores.py`. Processors are alike. At one moment predictions that have expired come first, then submissions, then
ends; after each submission and each end the policy looks at the queue once (Slurm's backfill instead every `interval`
seconds). Times are seconds, integers. Settings and order of events are those under which published figures of
kth-sp2-1996 come out (Gaussier, Glesser, Reis, Trystram, SC 2015; Tsafrir, Etsion, Feitelson, TPDS 2007).
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FCFS, EASY, EASY_SJBF, CONSERVATIVE, SLURM = range(5)
BY_LIMIT, BY_TRUTH, BY_LAST_TWO, BY_KEY = range(4)  # what a runtime is expected to be
TO_LIMIT, IN_STEPS = range(2)  # what becomes of an expectation that has passed
# Added to the first expectation when it has passed for the first, second … time, s; never beyond the limit.
_STEPS = np.array([60, 300, 900, 1800, 3600, 7200, 18_000, 36_000, 72_000, 180_000, 360_000], dtype=np.int64)
_NEVER = np.int64(2**62)


@compiled
def _newest_quantile(ring: Floats, count: int, q: float) -> float:
    """Quantile of the newest of a group's runtimes, ln(s), linear between neighbours; NaN where there is none."""
    filled = min(count, len(ring))
    if filled == 0:
        return np.nan
    ordered = np.sort(ring[:filled])
    position = q * (filled - 1)
    low = int(np.floor(position))
    return ordered[low] + (position - low) * (ordered[min(low + 1, filled - 1)] - ordered[low])


@compiled
def _shadow(now: Any, need: int, free: int, count: int, running: Ints, ends: Ints, procs: Ints) -> tuple[int, int]:
    """When a job could start by the ends that are expected of others, and what is free then beside it."""
    order = np.argsort(ends[running[:count]])
    at, left = now, free
    k = 0
    while k < count and left < need:
        at = ends[running[order[k]]]
        while k < count and ends[running[order[k]]] == at:
            left += procs[running[order[k]]]
            k += 1
    return at, left - need


@compiled
def _conservative(
    now: Any, queue: Ints, most: int, free: int, running: Ints, ends: Ints, procs: Ints, need: Ints, times: Ints,
    frees: Ints, is_started: NDArray[np.bool_], resolution: int,
) -> int:  # fmt: skip
    """Plan each waiting job in order around those before it; mark those that start now. Returns how many do.

    `times` and `frees` are room for the profile: from `times[k]` on `frees[k]` processors are free.
    """
    order = np.argsort(ends[running])
    steps = 1
    times[0], frees[0] = now, free
    for k in order:
        job = running[k]
        end = ends[job]
        if resolution > 1:
            end = now + -(-(end - now) // resolution) * resolution
        if end == times[steps - 1]:
            frees[steps - 1] += procs[job]
        else:
            times[steps], frees[steps] = end, frees[steps - 1] + procs[job]
            steps += 1
    started = 0
    for place in range(min(len(queue), most)):
        if steps + 2 >= len(times):
            break
        job = queue[place]
        wanted, length = procs[job], need[job]
        if resolution > 1:
            length = -(-length // resolution) * resolution
        begin = 0
        k = 0
        # The first step from which enough stays free for as long as it runs.
        while k < steps:
            if begin < k and times[k] >= times[begin] + length:
                break
            if frees[k] < wanted:
                begin = k + 1
            k += 1
        if begin >= steps:
            continue
        at = times[begin]
        stop = at + length
        last = begin
        while last + 1 < steps and times[last + 1] < stop:
            last += 1
        if last + 1 >= steps or times[last + 1] > stop:
            for k in range(steps, last + 1, -1):
                times[k], frees[k] = times[k - 1], frees[k - 1]
            times[last + 1], frees[last + 1] = stop, frees[last]
            steps += 1
        for k in range(begin, last + 1):
            frees[k] -= wanted
        if at == now:
            is_started[place] = True
            started += 1
    return started


@compiled
def replay(
    submit: Ints, procs: Ints, run: Ints, limit: Ints, user: Ints, key: Ints, total: int,
    policy: int, runtimes: int, correction: int, has_two: bool, scale: float, newest: int, quantile: float,
    interval: int, resolution: int, most: int,
) -> tuple[Ints, Ints, Floats]:  # fmt: skip
    """Run jobs through a cluster.

    Args:
        submit: When each job was submitted, s, rising.
        procs: How many processors it takes.
        run: How long it runs, s; no longer than its limit.
        limit: Its limit, s.
        user: Codes of users, 0 and up.
        key: Codes of keys, 0 and up.
        total: Processors.
        policy: `FCFS` and so on.
        runtimes: `BY_LIMIT` and so on: what jobs are expected to run, settled when they are submitted.
        correction: What becomes of an expectation that has passed.
        has_two: Running jobs are expected to end at their limit all the same, and while the first of the queue is past
            its promise those that might overtake it are judged by their limit.
        scale: Expectations are multiplied by it.
        newest: Of `BY_KEY`: how many of the newest ended runs are looked at.
        quantile: Of `BY_KEY`: which quantile of their ln.
        interval: Of `SLURM`: seconds between backfill cycles.
        resolution: Of `SLURM`: seconds to which it plans.
        most: Of `SLURM` and `CONSERVATIVE`: waiting jobs that are planned.

    Returns:
        Start of each job; when the first of the queue was first promised to start by the limits of running jobs, −1 for
        jobs that never were first; and the expectation at submission, s.
    """
    n = len(submit)
    start = np.full(n, -1, dtype=np.int64)
    promise = np.full(n, -1, dtype=np.int64)
    expected = np.zeros(n)
    ends = np.full(n, _NEVER, dtype=np.int64)  # expected
    step_of = np.zeros(n, dtype=np.int64)
    need = np.zeros(n, dtype=np.int64)
    by_limit = np.full(n, _NEVER, dtype=np.int64)
    queue = np.zeros(n, dtype=np.int64)
    running = np.zeros(n, dtype=np.int64)
    users, keys = (user.max() + 1 if n else 0), (key.max() + 1 if n else 0)
    of_user, of_key = np.zeros((users, newest)), np.zeros((keys, newest))
    seen_user, seen_key = np.zeros(users, dtype=np.int64), np.zeros(keys, dtype=np.int64)
    last_two = np.zeros((users, 2))
    times, frees = np.zeros(3 * n + 16, dtype=np.int64), np.zeros(3 * n + 16, dtype=np.int64)
    is_started = np.zeros(n, dtype=np.bool_)
    ending = [(np.int64(0), np.int64(0))]
    ending.pop()
    begun = np.zeros(n, dtype=np.int64)  # jobs in the order of their starts: ends at one moment come in that order
    turns = 0
    count, running_count, free, following = 0, 0, total, 0
    next_cycle = _NEVER
    now = np.int64(0)
    while following < n or running_count > 0 or count > 0:
        at = submit[following] if following < n else _NEVER
        kind = 0
        if len(ending) > 0 and ending[0][0] < at:
            at, kind = ending[0][0], 1
        if policy == SLURM and next_cycle < at:
            at, kind = next_cycle, 2
        if at == _NEVER:
            break
        now = at
        if kind == 0:
            job = following
            following += 1
            if runtimes == BY_TRUTH:
                guess = float(run[job])
            elif runtimes == BY_LAST_TWO:
                u = user[job]
                guess = float(limit[job])
                if seen_user[u] >= 2:
                    guess = min(guess, np.floor((last_two[u, 0] + last_two[u, 1]) / 2))
            elif runtimes == BY_KEY:
                guess = _newest_quantile(of_key[key[job]], seen_key[key[job]], quantile)
                if np.isnan(guess):
                    guess = _newest_quantile(of_user[user[job]], seen_user[user[job]], quantile)
                guess = float(limit[job]) if np.isnan(guess) else min(np.exp(guess), float(limit[job]))
            else:
                guess = float(limit[job])
            expected[job] = guess
            need[job] = max(np.int64(np.ceil(guess * scale)), 1)
            queue[count] = job
            count += 1
        elif kind == 1:
            _, turn = heapq.heappop(ending)
            job = begun[turn]
            free += procs[job]
            for k in range(running_count):
                if running[k] == job:
                    running[k] = running[running_count - 1]
                    running_count -= 1
                    break
            value = np.log(max(float(run[job]), 1.0))
            u, c = user[job], key[job]
            of_user[u, seen_user[u] % newest] = value
            of_key[c, seen_key[c] % newest] = value
            last_two[u, seen_user[u] % 2] = float(run[job])
            seen_user[u] += 1
            seen_key[c] += 1
        if kind == 2:
            next_cycle = _NEVER
        if count == 0:
            continue
        # What is expected of running jobs, where that has passed.
        for k in range(running_count):
            job = running[k]
            while ends[job] <= now and start[job] + run[job] > now:
                if correction == IN_STEPS:
                    later = start[job] + need[job] + _STEPS[min(step_of[job], len(_STEPS) - 1)]
                    ends[job] = min(later, max(by_limit[job], now + 1))
                    step_of[job] += 1
                else:
                    ends[job] = max(by_limit[job], now + 1)
        is_started[:count] = False
        # Whatever the policy: in order, until one does not fit. Slurm's main pass does no more.
        first = 0
        while first < count and procs[queue[first]] <= free:
            head = queue[first]
            is_started[first] = True
            free -= procs[head]
            by_limit[head] = now + limit[head]
            ends[head] = by_limit[head] if has_two else now + need[head]
            running[running_count + first] = head
            first += 1
        gone = first
        beside = running_count + first
        if first < count:
            head = queue[first]
            if promise[head] < 0:
                promise[head] = _shadow(now, procs[head], free, beside, running, by_limit, procs)[0]
            if policy == SLURM and kind != 2:
                next_cycle = min(next_cycle, (now // interval + 1) * interval)
            elif policy in (SLURM, CONSERVATIVE):
                gone += _conservative(
                    now, queue[first:count], most, free, running[:beside], ends, procs, need, times, frees,
                    is_started[first:count], resolution if policy == SLURM else 1,
                )  # fmt: skip
                for place in range(first, count):
                    if is_started[place]:
                        free -= procs[queue[place]]
            elif policy != FCFS and free > 0 and first + 1 < count:
                shadow, extra = _shadow(now, procs[head], free, beside, running, ends, procs)
                is_late = has_two and now > promise[head]
                if policy == EASY:
                    for place in range(first + 1, count):
                        job = queue[place]
                        length = limit[job] if is_late else need[job]
                        if procs[job] <= free and (now + length <= shadow or procs[job] <= extra):
                            is_started[place] = True
                            free -= procs[job]
                            gone += 1
                            if now + length > shadow:
                                extra -= procs[job]
                else:
                    while free > 0:
                        best, shortest = -1, _NEVER
                        for place in range(first + 1, count):
                            job = queue[place]
                            if is_started[place] or procs[job] > free or need[job] >= shortest:
                                continue
                            length = limit[job] if is_late else need[job]
                            if now + length <= shadow or procs[job] <= extra:
                                best, shortest = place, need[job]
                        if best < 0:
                            break
                        job = queue[best]
                        is_started[best] = True
                        free -= procs[job]
                        gone += 1
                        if now + (limit[job] if is_late else need[job]) > shadow:
                            extra -= procs[job]
        if gone > 0:
            kept = 0
            for place in range(count):
                job = queue[place]
                if not is_started[place]:
                    queue[kept] = job
                    kept += 1
                    continue
                start[job] = now
                by_limit[job] = now + limit[job]
                ends[job] = by_limit[job] if has_two else now + need[job]
                running[running_count] = job
                running_count += 1
                heapq.heappush(ending, (now + run[job], np.int64(turns)))
                begun[turns] = job
                turns += 1
            count = kept
    return start, promise, expected

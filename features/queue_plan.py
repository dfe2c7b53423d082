"""What the queue would do by its own rules: who starts now, when room comes, and when this job's turn would be.

Waiting jobs start in the order they came; one that cannot yet holds its place at the moment by which the limits of the
running jobs promise room, and others pass it only where they do not touch that (EASY backfilling). Ends are those
promised by limits or told by keyed recency, never true ones. Real schedulers deviate: these are features, not
forecasts. Here belong the sweep over a cluster's events and its columns; not other features of the queue
(`features/job_queue.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled
from features.job_history import NEVER, JobHistory
from features.job_table import JobTable
from features.queue_state import NO_LIMIT_S, QueueState, since_2000

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PLAN_FEATURES: tuple[str, ...] = (
    "plan_now", "plan_slack", "plan_head_width", "plan_head_wait", "plan_spare", "plan_overrun", "plan_newer",
    "plan_newer_width", "plan_smaller", "plan_newest_age", "plan_start_age", "plan_end_age", "plan_ended_since",
    "plan_next_limit", "plan_next_keyed", "plan_wait",
)  # fmt: skip
MAX_PENDING = 256  # the newest waiting jobs that are looked at
MAX_WORK = 20_000  # steps of a plan; where they do not suffice, the wait is at least as long as it got


def plan_columns(state: QueueState, jobs: JobTable, moments: Ints, own: Ints) -> dict[str, Floats]:
    """Columns `PLAN_FEATURES` of jobs asked about, each of shape (q,); lengths of time are ln(1 + s), signed.

    Args:
        state: State of the cluster's queue.
        jobs: Jobs asked about, shape (q,).
        moments: Moment of each question, µs, shape (q,).
        own: Row of each in the history, −1 where it is not in it; shape (q,).
    """
    history, table, q = state.history, state.history.table, len(moments)
    if not q:
        return {name: np.empty(0) for name in PLAN_FEATURES}
    rows = np.flatnonzero((table.submit <= moments.max()) & (table.end >= moments.min()))
    rows = rows[np.lexsort((table.identity[rows], table.submit[rows]))]
    place = np.full(table.count + 1, -1)
    place[rows] = np.arange(len(rows))
    submit, start, end = (_seconds(times[rows]) for times in (table.submit, table.start, table.end))
    started, left = np.isfinite(start), np.isfinite(end)
    moments_s = _seconds(moments)
    times = np.concatenate([submit, start[started], end[left], moments_s])
    places = np.concatenate([np.arange(len(rows)), np.flatnonzero(started), np.flatnonzero(left), np.arange(q)])
    kinds = np.repeat(np.arange(4), [len(rows), started.sum(), left.sum(), q])
    order = np.lexsort((places, kinds, times))  # at one time: submits, starts, what leaves, then the questions
    limit_s = np.where(np.isnan(jobs.limit_s), NO_LIMIT_S, jobs.limit_s)
    last_s = {event: _newest_s(history, event, moments) for event in ("start", "end")}
    raw = np.full((q, 13), np.nan)
    _sweep(
        kinds[order], places[order], submit, start, table.width[rows], state.limit_s[rows], state.keyed_s(rows),
        place[own], jobs.width, limit_s, moments_s, state.capacity(moments), last_s["start"], raw,
    )  # fmt: skip
    columns: dict[str, Floats] = dict(zip(PLAN_FEATURES[:10], raw[:, :10].T, strict=True))
    columns |= {
        "plan_start_age": moments_s - last_s["start"], "plan_end_age": moments_s - last_s["end"],
        "plan_ended_since": (last_s["end"] > last_s["start"]).astype(np.float64), "plan_next_limit": raw[:, 10],
        "plan_next_keyed": raw[:, 11], "plan_wait": raw[:, 12],
    }  # fmt: skip
    for name in PLAN_FEATURES:
        if name not in ("plan_now", "plan_slack", "plan_spare", "plan_ended_since"):
            values = np.where(np.isinf(columns[name]), np.nan, columns[name])
            columns[name] = np.sign(values) * np.log1p(np.abs(values))
    return columns


def _newest_s(history: JobHistory, event: str, moments: Ints) -> Floats:
    """The newest start or end before each moment, seconds since 2000; −inf where there is none."""
    slots = history.newest("all", event, np.zeros(len(moments), dtype=np.uint64), moments, 1)
    times = (history.table.start if event == "start" else history.table.end)[slots.rows[:, 0]]
    return np.where(slots.is_filled[:, 0], since_2000(times), -np.inf)


def _seconds(times: Ints) -> Floats:
    """Seconds since 2000, inf where it has not happened."""
    return np.where(times == NEVER, np.inf, since_2000(times))


@compiled
def _sweep(
    kinds: Ints, rows: Ints, submit: Floats, start: Floats, width: Floats, limit_s: Floats, keyed_s: Floats, own: Ints,
    asked_width: Floats, asked_limit_s: Floats, moments_s: Floats, capacity: Floats, last_start_s: Floats, out: Floats,
) -> None:  # fmt: skip
    """Events in order of time; each question is answered from what waits and runs when it comes."""
    n = len(submit)
    waiting, running = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)  # both in order of their rows
    is_waiting, is_running = np.zeros(n + 1, np.bool_), np.zeros(n + 1, np.bool_)
    by_limit, by_keyed, widths = np.empty(n + 1), np.empty(n + 1), np.empty(n + 1)  # of the running
    waits, runs, busy = 0, 0, 0.0
    seen_at, next_limit, next_keyed = -np.inf, np.inf, np.inf  # when the running were looked at, and their next ends
    kept = np.full(4, np.nan)  # the promise asked for last, then
    told_at, told = -np.inf, np.full(n, np.nan)  # plan of the moment that was asked about last
    planned = np.empty(0, np.int64)  # whom `told` speaks of
    for e in range(len(kinds)):
        kind, row = kinds[e], rows[e]
        if kind == 0:
            waiting[waits], is_waiting[row] = row, True
            waits += 1
            continue
        if kind != 3:
            if is_waiting[row]:
                at = np.searchsorted(waiting[:waits], row)
                waiting[at : waits - 1] = waiting[at + 1 : waits].copy()
                waits -= 1
                is_waiting[row] = False
            if kind == 1:
                at = np.searchsorted(running[:runs], row)
                running[at + 1 : runs + 1] = running[at:runs].copy()
                running[at], is_running[row] = row, True
                runs += 1
                busy += width[row]
            elif is_running[row]:
                at = np.searchsorted(running[:runs], row)
                runs -= 1
                running[at:runs] = running[at + 1 : runs + 1].copy()
                is_running[row] = False
                busy -= width[row]
            continue
        now, mine, total = moments_s[row], own[row], capacity[row]
        moved = mine >= 0 and not is_waiting[mine]  # it starts at this very moment, which is not known yet
        free = total - busy
        if seen_at != now:  # all events of a moment come before its questions
            for i in range(runs):
                r = running[i]
                promised = start[r] + limit_s[r]
                by_limit[i] = promised if promised > now else now + 60.0
                told_end = start[r] + keyed_s[r]
                if told_end <= now:  # past its expected end it is thought to go on for half as long as it has run
                    told_end = now + 0.5 * (now - start[r])
                by_keyed[i] = min(told_end, by_limit[i])
                widths[i] = width[r]
            seen_at, next_limit, next_keyed = now, _soonest(by_limit[:runs]), _soonest(by_keyed[:runs])
            kept[:] = np.nan
        limits, keyeds, helds = by_limit[:runs], by_keyed[:runs], widths[:runs]
        if moved:
            seen_at = -np.inf  # what is seen without this job holds for it alone
            kept[:] = np.nan
            if is_running[mine]:
                others = running[:runs] != mine
                limits, keyeds, helds = limits[others], keyeds[others], helds[others]
                free += width[mine]
                next_limit, next_keyed = _soonest(limits), _soonest(keyeds)
        queue = waiting[max(0, waits - MAX_PENDING) : waits]
        _now(
            row, mine, now, free, queue, limits, helds, submit, width, limit_s, asked_width[row], asked_limit_s[row],
            last_start_s[row], kept, out,
        )  # fmt: skip
        if len(limits):
            out[row, 10], out[row, 11] = next_limit - now, next_keyed - now
        if mine < 0 or asked_width[row] > total:
            continue
        if not moved and told_at == now:
            out[row, 12] = told[mine]
            continue
        told[planned] = np.nan
        planned = np.append(queue, mine) if moved else queue.copy()
        if moved:
            planned = planned[np.argsort(submit[planned], kind="mergesort")]
        _plan(now, free, planned, keyeds, limits, helds, width, limit_s, keyed_s, told)
        told_at = -np.inf if moved else now
        out[row, 12] = told[mine]


@compiled
def _soonest(ends: Floats) -> float:
    return ends.min() if len(ends) else np.inf


@compiled
def _promise(free: float, needed: float, now: float, ends: Floats, widths: Floats) -> tuple[float, float]:
    """When the running leave room by these ends, and what is free besides then."""
    until = now
    if free < needed:
        for i in np.argsort(ends, kind="mergesort"):
            free += widths[i]
            until = ends[i]
            if free >= needed:
                break
    return until, free - needed


@compiled
def _now(
    row: int, mine: int, now: float, free: float, queue: Ints, ends: Floats, widths: Floats, submit: Floats,
    width: Floats, limit_s: Floats, asked: float, limit: float, last_start: float, kept: Floats, out: Floats,
) -> None:  # fmt: skip
    """Whether the job would start now. Those that came before the last start were refused then, and are so still."""
    head, until, spare = -1, 0.0, 0.0
    newer, newer_width, smaller, newest = 0, 0.0, 0, np.nan
    for i in range(len(queue)):
        job = queue[i]
        if job == mine:
            continue
        is_newer = submit[job] > last_start
        if is_newer:
            newer += 1
            newer_width += width[job]
        if width[job] <= asked and limit_s[job] <= limit:
            smaller += 1
        newest = now - submit[job]
        if width[job] > free:
            if head < 0:
                head = job
                if kept[0] != free or kept[1] != width[job]:
                    kept[0], kept[1] = free, width[job]
                    kept[2], kept[3] = _promise(free, width[job], now, ends, widths)
                until, spare = kept[2], kept[3]
        elif is_newer:
            if head < 0:
                free -= width[job]
            elif now + limit_s[job] <= until or width[job] <= spare:
                free -= width[job]
                if now + limit_s[job] > until:
                    spare -= width[job]
    out[row, 0] = 1.0 if asked <= free and (head < 0 or now + limit <= until or asked <= spare) else 0.0
    out[row, 1] = free - asked
    if head >= 0:
        out[row, 2], out[row, 3] = width[head], until - now
        out[row, 4], out[row, 5] = spare - asked, now + limit - until
    else:
        out[row, 2], out[row, 4] = 0.0, free - asked
    out[row, 6], out[row, 7], out[row, 8], out[row, 9] = newer, newer_width, smaller, newest


@compiled
def _plan(
    now: float, free: float, queue: Ints, by_keyed: Floats, by_limit: Floats, widths: Floats, width: Floats,
    limit_s: Floats, keyed_s: Floats, told: Floats,
) -> None:  # fmt: skip
    """Planned wait of each waiting job: ends by keyed recency, promises by limits."""
    count, left = len(by_keyed), len(queue)
    line = queue.copy()
    ends, promised = np.empty(count + left), np.empty(count + left)
    held = np.empty(count + left)
    ends[:count], promised[:count], held[:count] = by_keyed, by_limit, widths
    clock, work, known = now, 0, -1
    until, spare = 0.0, 0.0
    while left > 0 and work < MAX_WORK:
        head, kept = -1, 0
        for i in range(left):
            job = line[i]
            can = width[job] <= free
            if can and head >= 0 and clock + limit_s[job] > until:
                can = width[job] <= spare
                if can:
                    spare -= width[job]
            if can:
                told[job] = clock - now
                free -= width[job]
                ends[count], promised[count], held[count] = clock + keyed_s[job], clock + limit_s[job], width[job]
                count += 1
                continue
            if head < 0:
                head = job
                if known != job:
                    until, spare = _promise(free, width[job], clock, promised[:count], held[:count])
                    known = job
                    work += 8 * count
            line[kept] = job
            kept += 1
        work += left + count + 1
        left = kept
        if count == 0:
            break
        first = np.argmin(ends[:count])
        clock = max(clock, ends[first])
        free += held[first]
        count -= 1
        ends[first], promised[first], held[first] = ends[count], promised[count], held[count]
    for i in range(left):
        told[line[i]] = clock - now

"""What the figures of published forecasts say, in plain sentences with numbers and what to do.

Here belong thresholds and words; not the figures (`models/outcome_scores.py`, `models/drift.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from models.calibration import MIN_ROWS
from models.drift import MIN_JOBS, MIN_WEEKS, Shift
from models.outcome_scores import KindOutcome
from models.promotion import COVERAGE_GUARD, MIN_BLOCKS
from models.start_plans import PLAN

NOMINAL = 0.80
SHIFTED = 0.25  # the index from which inputs are commonly held to be another population; weeks of a cluster reach it
MARGIN_RATIO = 1.25  # so that much over the highest of the weeks before it is also needed
FATES = ("FAILS", "could not judge", "passes")
VERDICTS = ("runtime_calibrated", "runtime_beats_baseline", "wait_calibrated", "inputs_stable")
_INPUT_WORDS = {
    "limit": "time limits", "size": "sizes", "queue": "queues", "key_seen": "share of jobs like earlier ones",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """One statement about a cluster.

    Attributes:
        name: One of `VERDICTS`.
        passed: Nothing is to be done; also where too few outcomes say anything.
        words: A sentence with the figures, and what to do where it did not pass.
        is_judged: There was enough to judge by.
    """

    name: str
    passed: bool
    words: str
    is_judged: bool = True

    @property
    def fate(self) -> str:
        """One of `FATES`."""
        return "could not judge" if not self.is_judged else "passes" if self.passed else "FAILS"


def verdicts(found: Mapping[str, KindOutcome], shifts: Sequence[Shift]) -> list[Verdict]:
    """What is to be thought of a week of published forecasts, by kind, and of the jobs that came."""
    runtime = found["runtime"]
    return [calibrated(runtime), beats_baseline(runtime), calibrated(found["wait"]), stable(shifts)]


def calibrated(outcome: KindOutcome) -> Verdict:
    """Whether the 10–90 % interval of runtimes, or of waits, held about as often as it says.

    It fails when coverage is out of the guard of promotion (±0.10) and its 95 % interval does not reach nominal.
    """
    name, what = f"{outcome.kind}_calibrated", f"{outcome.kind}s"
    inside, coverage = outcome.find("coverage_80"), outcome.find("covered_share_80")
    if inside is None or coverage is None:
        return _too_few(name, outcome)
    said = f"{inside.value:.0%} of {outcome.rows:,} {what} lay in their 10–90 % interval, nominal {NOMINAL:.0%}"
    if round(inside.value, 2) != round(coverage.value, 2):
        said += f" ({coverage.value:.0%} where those on its very end count in part)"
    low, high = _ends(coverage.low, coverage.high, coverage.value)
    is_off = abs(coverage.value - NOMINAL) > COVERAGE_GUARD and not low <= NOMINAL <= high
    if not is_off:
        return Verdict(name, True, said)
    way = "too narrow" if coverage.value < NOMINAL else "too wide"
    use = "What a plan fits into gaps by is off" if outcome.kind == "runtime" else "Starts that users are told are off"
    if all(version.startswith("baseline:") for version in outcome.versions):
        advice = "a baseline speaks, for no model has earned it; `weatherglass models list` says why"
    else:
        advice = (
            f"retrain (`weatherglass retrain --task {outcome.kind}`), and if tomorrow's figure is no better, roll back "
            "with `weatherglass models rollback`"
        )
    return Verdict(name, False, f"{said}: intervals are {way}. {use}; {advice}.")


def beats_baseline(runtime: KindOutcome) -> Verdict:
    """Whether published runtimes are no worse than the best baseline; fails when the interval is above one."""
    name = "runtime_beats_baseline"
    ratio, own = runtime.find("male_ratio", runtime.best_baseline), runtime.find("male")
    other = runtime.find("male", runtime.best_baseline)
    if ratio is None or own is None or other is None:
        return _too_few(name, runtime)
    said = (
        f"medians of {runtime.rows:,} runtimes are off by a factor of {_factor(own.value)}, {_factor(other.value)} by "
        f"{runtime.best_baseline}: error (mean |ln ratio|) {abs(1 - ratio.value):.1%} "
        f"{'better' if ratio.value <= 1 else 'worse'}, published by {_speakers(runtime)}"
    )
    if ratio.low is None or ratio.high is None:
        words = f"{said}; too few days and users to tell ({ratio.blocks} of {MIN_BLOCKS})"
        return Verdict(name, True, words, is_judged=False)
    said += f" (95 %: ratio {ratio.low:.3f} to {ratio.high:.3f})"
    if ratio.low <= 1.0:
        return Verdict(name, True, said)
    return Verdict(
        name, False,
        f"{said}: what was published is worse than repeating the last runtimes. Roll back with "
        "`weatherglass models rollback`, and look at what changed in jobs that day.",
    )  # fmt: skip


def stable(shifts: Sequence[Shift]) -> Verdict:
    """Whether the jobs of the newest week ask for what those before it asked for.

    An input has shifted when its index is 0.25 or more and a quarter above that of every week before. With too few
    weeks before it nothing is said: 0.25 by itself is reached in most weeks of a cluster.
    """
    name = "inputs_stable"
    if not shifts:
        words = f"too few jobs to tell: {MIN_JOBS} in the newest week and {MIN_JOBS} before it are needed"
        return Verdict(name, True, words, is_judged=False)
    judged = [shift for shift in shifts if shift.usual is not None]
    if not judged:
        words = (
            "too few weeks to tell how far weeks differ: before the newest, "
            f"{MIN_WEEKS} weeks with {MIN_JOBS} jobs each are needed"
        )
        return Verdict(name, True, words, is_judged=False)
    moved = [shift for shift in judged if shift.value >= SHIFTED and shift.value > MARGIN_RATIO * (shift.usual or 0.0)]
    shown = moved or judged
    said = ", ".join(f"{_INPUT_WORDS[shift.name]} {_index(shift)}" for shift in shown)
    if not moved:
        return Verdict(name, True, f"stability index of the newest week, {shifts[0].jobs:,} jobs: {said}")
    return Verdict(
        name, False,
        f"the newest week's jobs differ from those before ({moved[0].jobs:,} against {moved[0].reference_jobs:,}): "
        f"stability index {said}. Forecasts learnt from other jobs: watch runtime_calibrated, and retrain once a "
        "week of the new jobs has ended.",
    )  # fmt: skip


def start_words(wait: KindOutcome) -> list[str]:
    """How steady published starts were, and how they stand beside the scheduler's own plans, in sentences.

    Args:
        wait: Outcomes of waits, with their churn.

    Returns:
        No sentence where too few waits were judged.
    """
    words = []
    move, moved, drift = (wait.find(f"churn_{name}") for name in ("move_s", "moved_share", "drift_s"))
    if move and moved and drift:
        words.append(
            f"the published start of a waiting job moves by {_span(move.value)} from one publication to the next "
            f"(median), by over ten minutes in {moved.value:.0%} of them, {_span(abs(drift.value))} "
            f"{'later' if drift.value >= 0 else 'earlier'} on the whole"
        )
    share = wait.find("planned_share", PLAN)
    if share is None:
        return words
    later = wait.find("planned_share_600s", PLAN)
    said = f"the scheduler had planned a start for {share.value:.0%} of {wait.rows:,} jobs at their first publication"
    said += f", for {later.value:.0%} after ten minutes of waiting" if later else ""
    for end, when in (("", "those"), ("_600s", "those after ten minutes")):
        own, plan = wait.find(f"planned_male{end}"), wait.find(f"planned_male{end}", PLAN)
        if own and plan:
            said += (
                f"; on {when} the published wait was off by a factor of {_factor(own.value)}, its plan by "
                f"{_factor(plan.value)}"
            )
    return [*words, said]


def kind_words(found: Mapping[str, KindOutcome]) -> list[str]:
    """A sentence on each kind beside the runtime that was judged: its error beside that of the best baseline.

    Args:
        found: Kind → how its publications did.
    """
    words = []
    for kind, of_what in (("remaining", "times left"), ("wait", "waits"), ("failure", "odds of a bad end")):
        outcome = found[kind]
        metric = "brier" if kind == "failure" else "male"
        own, other = outcome.find(metric), outcome.find(metric, outcome.best_baseline)
        ratio = outcome.find(f"{metric}_ratio", outcome.best_baseline)
        if own is None or other is None or ratio is None:
            words.append(f"{of_what}: too few outcomes to tell, {outcome.rows} of {MIN_ROWS}")
            continue
        if kind == "failure":
            said = f"mean squared error {own.value:.3f}, {other.value:.3f} by {outcome.best_baseline}"
        else:
            said = f"off by a factor of {_factor(own.value)}, {_factor(other.value)} by {outcome.best_baseline}"
        said += f" (ratio of errors {ratio}), {outcome.rows:,} judged, published by {_speakers(outcome)}"
        coverage = outcome.find("coverage_80")
        said += f"; the 10–90 % interval held {coverage.value:.0%}" if coverage else ""
        words.append(f"{of_what}: {said}")
    return words


def _factor(male: float) -> str:
    """A mean |ln ratio| as the factor that it stands for."""
    return f"{exp(male):.2f}" if male < log(100) else f"{exp(min(male, 20.0)):,.0f}"


def _speakers(outcome: KindOutcome) -> str:
    names = list(outcome.versions)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _index(shift: Shift) -> str:
    return f"{shift.value:.2f} (weeks before up to {shift.usual:.2f})"


def _too_few(name: str, outcome: KindOutcome) -> Verdict:
    come = f"of the published {outcome.kind}s {outcome.rows} have come to an end"
    words = f"too few outcomes to tell: {come}, {MIN_ROWS} needed"
    return Verdict(name, True, words, is_judged=False)


def _ends(low: float | None, high: float | None, value: float) -> tuple[float, float]:
    return (value if low is None else low), (value if high is None else high)

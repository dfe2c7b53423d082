"""Times of sacct text that were written in a time zone: which moment a clock's reading means, and which none.

In the hour that clocks show twice the moments are chosen that agree with how long the job ran; text in UTC or in
seconds since the epoch needs none of this.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import polars as pl

TIMES = ("submit_time", "eligible_time", "start_time", "end_time", "planned_start_time")
_AMISS_S = 1e9  # weighs more than any span that does not fit


@dataclass(slots=True)
class ZoneTimes:
    """A time zone that text was written in.

    Attributes:
        zone: Its name, as Europe/Berlin.
        lost: Column, job id and clock time of each that the zone's clocks skip; they become null.
    """

    zone: str
    lost: list[tuple[str, str, datetime]] = field(default_factory=list)

    def placed(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Jobs with their times in UTC.

        Args:
            frame: `job_id`, `TIMES` as the clock showed them, said to be UTC, `elapsed_s` and `_suspended_s`.
        """
        first = {name: self._moment(name, "earliest") for name in TIMES}
        again = {name: self._moment(name, "latest") for name in TIMES}
        both = frame.with_columns(
            *(moment.alias(f"_first_{name}") for name, moment in first.items()),
            *(moment.alias(f"_again_{name}") for name, moment in again.items()),
        )
        for name in TIMES:
            gone = both.filter(pl.col(name).is_not_null() & pl.col(f"_first_{name}").is_null())
            self.lost += [(name, str(job), at) for job, at in gone.select("job_id", name).iter_rows()]
        submit = pl.col("_first_submit_time")
        span_s = pl.col("elapsed_s") + pl.col("_suspended_s").fill_null(0)
        pairs = [(start, end) for start in ("first", "again") for end in ("first", "again")]
        costs = []
        for start_of, end_of in pairs:
            start, end = pl.col(f"_{start_of}_start_time"), pl.col(f"_{end_of}_end_time")
            between_s = (end - start).dt.total_seconds()
            unfit = pl.coalesce((between_s - span_s).abs(), pl.when(between_s < 0).then(_AMISS_S), 0.0)
            costs.append(unfit + pl.when(start < submit).then(_AMISS_S).otherwise(0.0))
        both = both.with_columns(cost.alias(f"_cost_{i}") for i, cost in enumerate(costs))
        best = pl.min_horizontal(f"_cost_{i}" for i in range(len(pairs)))
        chosen = {
            name: pl.coalesce(
                pl.when(pl.col(f"_cost_{i}") == best).then(pl.col(f"_{pair[which]}_{name}"))
                for i, pair in enumerate(pairs)
            )
            for which, name in enumerate(("start_time", "end_time"))
        }
        eligible = pl.col("_first_eligible_time")
        placed = both.with_columns(
            submit.alias("submit_time"),
            pl.when(eligible < submit).then("_again_eligible_time").otherwise(eligible).alias("eligible_time"),
            pl.col("_first_planned_start_time").alias("planned_start_time"),
            **chosen,
        )
        return placed.select(frame.columns)

    def _moment(self, name: str, which: str) -> pl.Expr:
        clock = pl.col(name).dt.replace_time_zone(None)
        return clock.dt.replace_time_zone(self.zone, ambiguous=pl.lit(which), non_existent="null").dt.convert_time_zone(
            "UTC"
        )

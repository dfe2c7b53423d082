"""Faults that are told by absence: GPUs that vanish, come back, are replaced, and those that were only given back."""

from datetime import timedelta

import polars as pl
import pytest

from pipelines.faults import derive_faults
from pipelines.settings import IngestSettings
from pipelines.silences import MINUTES
from pipelines.spans import TELEMETRY_MARK
from tests.pipelines_world import START, seconds
from tests.store_child import open_store

SETTINGS = IngestSettings(overlap_s=0)
LENGTH = 60


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as opened:
        yield opened


def minutes(gpus: dict, node: str = "n1") -> pl.DataFrame:
    """A row of each GPU in each of its minutes; a GPU is its minutes, or a dict of its jobs with theirs."""
    rows = [
        (START + timedelta(minutes=minute), "a", node, gpu, job)
        for gpu, spans in gpus.items()
        for job, span in (spans.items() if isinstance(spans, dict) else [(None, spans)])
        for minute in span
    ]
    return pl.DataFrame(
        rows, schema=["ts", "cluster", "node", "gpu_uuid", "job_id"], orient="row"
    ).with_columns(gpu_temp_c=pl.lit(50.0), job_id=pl.col("job_id").cast(pl.String))  # fmt: skip


def faults(store, *frames: pl.DataFrame, step: int = 20, slots: pl.DataFrame | None = None, ups: tuple = ()) -> list:
    """Faults as (node, GPU, kind, begin, end), minutes after START, derived every `step` minutes."""
    store.transact(lambda w: w.append(MINUTES, pl.concat(frames)))
    if slots is not None:
        store.transact(lambda w: w.append("core_slots", slots))
    if ups:
        rows = [(START + timedelta(minutes=m), "a", node, True) for node in ups for m in range(LENGTH)]
        up = pl.DataFrame(rows, schema=["ts", "cluster", "node", "is_up"], orient="row")
        store.transact(lambda w: w.append("core_node_samples", up))
    store.transact(lambda w: w.set_mark("a", "core_faults", START))
    for minute in range(step, LENGTH + 1, step):
        at = START + timedelta(minutes=minute)
        store.transact(lambda w, at=at: [w.set_mark("a", name, at) for name in (TELEMETRY_MARK, MINUTES)])
        derive_faults(store, "a", SETTINGS)
    columns = "node, gpu_uuid, kind, epoch(start_time) AS a, epoch(end_time) AS b"
    found = store.query(f"SELECT {columns} FROM core_faults ORDER BY start_time, node, gpu_uuid").rows()
    zero = START.timestamp()
    return [(*row[:3], (row[3] - zero) / 60, None if row[4] is None else (row[4] - zero) / 60) for row in found]


def slot(gpu: str, place: str, begin: int, end: int | None = None) -> dict:
    return {
        "cluster": "a", "node": "n1", "slot": place, "gpu_uuid": gpu, "start_time": START + seconds(60 * begin),
        "end_time": None if end is None else START + seconds(60 * end),
    }  # fmt: skip


ALL = range(LENGTH)


@pytest.mark.parametrize("step", [10, LENGTH])
def test_a_gpu_that_is_gone_stays_lost_until_it_is_back(store, step):
    gone, back = range(10), [*range(15), *range(40, LENGTH)]
    both = (minutes({"A": ALL, "B": gone}), minutes({"A": ALL, "B": back}, "n2"))
    assert faults(store, *both, step=step) == [("n1", "B", "gpu_lost", 10, None), ("n2", "B", "gpu_lost", 15, 40)]


def test_two_gpus_that_fell_silent_at_once_are_one_fault_until_both_are_back(store):
    first, second = [*range(10), *range(20, LENGTH)], [*range(10), *range(45, LENGTH)]
    assert faults(store, minutes({"A": ALL, "B": first, "C": second})) == [("n1", "B", "gpu_lost", 10, 45)]


def test_another_board_in_its_slot_ends_it_and_one_that_moved_there_does_not(store):
    slots = pl.DataFrame(
        [slot("A", "0", -60), slot("B", "1", -60, 30), slot("new", "1", 30)],
        schema_overrides={"end_time": pl.Datetime("us", "UTC")},
    )
    gone = {"A": ALL, "B": range(10), "new": range(30, LENGTH)}
    assert faults(store, minutes(gone), slots=slots) == [("n1", "B", "gpu_lost", 10, 30)]


def test_indices_that_move_up_after_a_boot_replace_nobody(store):
    slots = pl.DataFrame(
        [slot("B", "0", -60, 30), slot("A", "1", -60, 30), slot("A", "0", 30)],
        schema_overrides={"end_time": pl.Datetime("us", "UTC")},
    )
    assert faults(store, minutes({"A": ALL, "B": range(10)}), slots=slots) == [("n1", "B", "gpu_lost", 10, None)]


HELD = {"7": ALL}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        # Given back with the end of its job, where exporters show no GPU without one.
        ({"A": HELD, "B": {"8": range(10)}}, []),
        ({"A": HELD, "B": {"8": range(10)}, "C": {"8": range(10)}}, []),
        ({"A": HELD, "B": {"8": range(10), "9": range(40, LENGTH)}}, []),
        # Its job goes on beside it.
        ({"A": HELD, "B": {"7": range(10)}}, [("n1", "B", "gpu_lost", 10, None)]),
        # GPUs without a job are shown here.
        ({"A": HELD, "B": {"8": range(10)}, "C": ALL}, [("n1", "B", "gpu_lost", 10, None)]),
        ({"A": {"7": range(30), None: range(30, LENGTH)}, "B": [*range(10)]}, [("n1", "B", "gpu_lost", 10, None)]),
    ],
)  # fmt: skip
def test_a_gpu_that_was_given_back_is_not_lost(store, gpus, expected):
    assert faults(store, minutes(gpus)) == expected


@pytest.mark.parametrize(("ups", "expected"), [(("n2",), []), ((), [("n2", "", "node_down", 10, None)])])
def test_a_node_all_of_whose_gpus_were_given_back_is_up_where_it_says_so(store, ups, expected):
    free = minutes({"B": {"8": range(10)}, "C": {"8": range(10)}}, "n2")
    assert faults(store, minutes({"A": HELD}), free, ups=ups) == expected

"""A writer in a process of its own, for tests that kill it: `python -m tests.store_child FOLDER CLUSTER`.

Writes the windows of `window` from the cluster's mark on, each in one transaction with its mark.
"""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from pipelines.store import Store

START = datetime(2026, 3, 1, tzinfo=UTC)
WINDOW = timedelta(minutes=5)
WINDOWS = 8
GPUS = 100
ROWS = GPUS * 10


def open_store(folder, **options):
    return Store.open(f"sqlite:{Path(folder) / 'catalogue.sqlite'}", str(Path(folder) / "data"), **options)


def window(index, cluster):
    """The rows of one window: the same for the same index, every time."""
    at = START + index * WINDOW
    return at, at + WINDOW, pl.DataFrame({
        "ts": [at + timedelta(seconds=30 * (i // GPUS)) for i in range(ROWS)],
        "cluster": [cluster] * ROWS,
        "node": [f"n{i % GPUS // 8 + 1}" for i in range(ROWS)],
        "gpu_uuid": [f"GPU-{i % GPUS}" for i in range(ROWS)],
        "gpu_temp_c": [float(30 + (i * 7 + index * 13) % 50) for i in range(ROWS)],
        "gpu_power_w": [float((i * 31 + index) % 700) for i in range(ROWS)],
    })  # fmt: skip


def write_window(store, index, cluster):
    start, end, frame = window(index, cluster)

    def work(writer):
        writer.replace_window("core_gpu_samples", cluster, start, end, frame)
        nodes = frame.select("ts", "cluster", "node", pl.col("gpu_power_w").alias("node_power_w"))
        writer.replace_window("core_node_samples", cluster, start, end, nodes)
        writer.set_mark(cluster, "test", end)

    store.transact(work)


def next_index(store, cluster):
    mark = store.mark(cluster, "test")
    return 0 if mark is None else round((mark - START) / WINDOW)


def run(folder, cluster, windows=WINDOWS):
    with open_store(folder) as store:
        print("ready", flush=True)
        for index in range(next_index(store, cluster), windows):
            write_window(store, index, cluster)
            print(index, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2])

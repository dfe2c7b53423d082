"""Rates of ports a reading at a time are those that cleaning gives over all of it."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from features.cleaning import clean_port_samples
from features.port_course import PortRates
from features.vocabulary import PORT_RATES

START = datetime(2026, 11, 4, tzinfo=UTC)


def readings(seed: int = 1, count: int = 60) -> pl.DataFrame:
    """Counters with resets, dips, silences, an impossible rate and one that stands at its 32-bit end."""
    rng = np.random.default_rng(seed)
    parts = []
    for port in range(4):
        steps = rng.choice([15.0, 15.0, 15.0, 30.0], count)
        if port == 3:
            steps[20] = 1_200.0  # silent for longer than a rate may span
        seconds = np.cumsum(steps)
        tx = np.cumsum(rng.uniform(0, 20e9, count) * steps)
        marks = np.cumsum(rng.poisson(3_000, count)).astype(float)
        if port == 0:
            tx[30:] -= tx[30]  # began anew
        if port == 1:
            marks[25] = marks[24] - 10  # read earlier than it is stamped
        if port == 2:
            tx[40:] += 1e15  # more than the port can carry
            marks[10:] = 2**32 - 1
        parts.append(
            pl.DataFrame(
                {
                    "ts": [START + timedelta(seconds=float(value)) for value in seconds], "cluster": "c", "node": "n1",
                    "device": f"mlx5_{port}", "port": "1", "tx_bytes_total": tx, "ecn_marked_total": marks,
                    "speed_bytes_per_s": 50e9,
                }
            )
        )  # fmt: skip
    return pl.concat(parts)


def test_live_rates_are_those_of_cleaning():
    rows = readings()
    cleaned, _ = clean_port_samples(rows)
    live = PortRates()
    whole = PortRates().take(rows).sort("node", "device", "port", "ts")
    parts = [live.take(part) for _, part in rows.sort("ts").group_by("ts", maintain_order=True)]
    found = pl.concat(parts).sort("node", "device", "port", "ts")
    assert whole.equals(found)
    assert found.columns == cleaned.columns
    assert found.select("device", "ts").equals(cleaned.select("device", "ts"))
    for name in PORT_RATES.values():
        assert (found[name].is_null() == cleaned[name].is_null()).all(), name
        np.testing.assert_allclose(found[name].drop_nulls(), cleaned[name].drop_nulls(), rtol=1e-5)
    assert found["tx_bytes_per_s"].null_count() > 4
    assert found["ecn_marked_per_s"].null_count() > 20


def test_a_reading_given_twice_is_one():
    rows = readings()
    first = rows.filter(pl.col("ts") <= START + timedelta(seconds=60))
    live = PortRates()
    assert live.take(first).height == first.height
    assert live.take(first).is_empty()
    assert live.take(rows.clear()).is_empty()
    live.forget((START + timedelta(hours=9)).timestamp())
    again = live.take(first.filter(pl.col("ts") >= START + timedelta(seconds=45)).unique("device"))
    assert again.height == 4
    assert again["tx_bytes_per_s"].null_count() == 4  # what was forgotten has no rate to begin with

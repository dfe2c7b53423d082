"""Metric vocabulary, cleaning, windows, job features and labels: pure functions of Polars frames."""

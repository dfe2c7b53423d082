"""Measurements, printed beside their goals: `python -m benchmarks`."""

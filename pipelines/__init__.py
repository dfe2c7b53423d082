"""Dagster definitions, sources, the store, and the wiring of processes: all I/O with the outside."""

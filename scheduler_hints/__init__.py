"""Nowcast loop, backfill windows, hints API, Slurm agent and client."""

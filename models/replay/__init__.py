"""Replays of recorded jobs under scheduling policies, with and without forecasts of their runtimes."""

"""Tests; `tests/services.py` starts the real servers they need."""

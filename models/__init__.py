"""Forecasters, calibration, backtests, registry and promotion: pure but for the registry folder."""

"""Dagster assets by layer: each fetches or reads, calls a plain function of `pipelines/steps.py`, and says what it did.

No work is done here. One run of an asset serves all clusters; what goes wrong with one stands in the metadata and in a
check, and does not keep the others from going on.
"""

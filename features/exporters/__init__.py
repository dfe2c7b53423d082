"""What exporters call things, a module for each family of exporters.

A module here holds rows (`Metric`) and the remarks that explain them; nothing that reads or computes. They are put
together in `features/metrics.py`. Another exporter is more rows here and nothing anywhere else.
"""

"""A GPU cluster that is not there: exporters, jobs, and faults with known ground truth."""

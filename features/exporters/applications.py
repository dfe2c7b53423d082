"""What a training application may export of itself. The names are Weatherglass's own convention. Rows only.

No exporter of GPUs or schedulers knows these; an application that wants them known exports gauges with the id of its
job in a label. `training_phase` is 1 where its label `phase` names what the job is at.
"""

from __future__ import annotations

from features.exporters.metric import Metric, family

_training = family("applications", "training_", entity="progress")

ROWS: tuple[Metric, ...] = (
    *_training("step", "step", meaning="training steps that are done"),
    *_training("step_time_seconds", "step_time_s", meaning="duration of the last step"),
    *_training(
        "communication_time_seconds", "communication_time_s", meaning="part of the last step that waited for others"
    ),
    *_training("max_steps", "max_steps", meaning="steps after which the job will be done"),
    *_training("loss", "loss"),
    *_training("phase", "phase", kind="info", meaning="1 where the label `phase` names what the job is at"),
)  # fmt: skip

"""The vocabulary as text: the list of `weatherglass metrics` and the page docs/metrics.md. No I/O, no rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from features.exporters.metric import FED, KINDS, LANE, Metric
from features.metrics import ENTITY_COLUMNS, MetricTable
from features.vocabulary import COLUMNS

_HEAD = """\
# Metrics

Every metric that Weatherglass knows, what it feeds, and how it is read. This page is generated:
`weatherglass metrics --markdown > docs/metrics.md`. `weatherglass metrics TEXT` lists what has TEXT in its name,
`--column NAME` what feeds a column, `--cluster NAME` shows the list with that cluster's own mappings.

## How to read the list

- **feeds** is a column of the registry and the kind of thing it belongs to: `gpu` (samples of a GPU), `health`
  (counters and states of a GPU that change seldom), `xid` (one XID code of a GPU), `job` (the job on a GPU or node),
  `link` (one NVLink), `port` (a network device and port, or a switch between GPUs, as `nvswitch0`, and one of its
  links), `node`, `queue` (a value of `core_queue_samples`, named by its metric; read from Prometheus), `progress` (a
  job as its application tells of it: `core_job_progress`; read from Prometheus).
  Metrics that feed no frame are read by the readers of Kubernetes, of queues and of jobs, or are only explained.
- **×** is the scale: value × scale is in the column's unit.
- **rank**: when a thing exposes several metrics of one column, the lowest rank whose value can be true wins. Spellings
  of one metric share a rank.
- **part**: the column is the sum of its parts (a flag: any of them). A sum of which a part is exposed as a number for
  "not there" is null, and counted: what is left of it would pass for the whole.
- Columns that begin with `_` are read to make another one.
- `#` stands for the number of an NVLink, `*` for anything.
- Counts of XID codes stand together in `xid_counts` of a GPU, as `31=3 79=1`. A rise of one is an event of that code,
  whatever the last code (`xid_last`) says.
- Throughput and errors of single NVLinks are summed up to the GPU where nothing gives the whole.
- Counters that feed a rate (`…_per_s`) are differentiated: no rate at the first sample, after a reset or a gap of
  five minutes; a counter that stands still is silent after a minute, since exporters refresh more slowly than they are
  scraped.

Kinds, whatever type an exporter declares:

"""
_MIDDLE = """
## Whose series it is

The node is told by the first of `node`, `Hostname`, `hostname`, `kubernetes_node`, `nodename`, `host`, `instance` that
has a value; a `Hostname` that is the name of the exporter's own pod, or the id of its container, is passed over. On
Kubernetes (`jobs = "kubernetes"`) kube-state-metrics tells the node behind a pod's name or address. A label that
Prometheus renamed (`exported_…`) is the exporter's own and goes first. A GPU is its UUID, else node and index; a MIG
instance (`GPU_I_ID`, `GPU_I_PROFILE`) or a partition of an AMD GPU is a row of its own. Labels of pods, drivers, VBIOS
and replicas never take part: one GPU stays one GPU when they come and go. Of replicas (`replica_labels` of the cluster)
one is read, and another where it stops.

The job is told by `hpc_job`, `job_id`, `slurm_job_id`, `slurm_jobid` or `jobid`, or by an exporter's series of its own
(`job` in the lists: jobstats' id of each GPU's job, Omnistat's jobs of a node). On Kubernetes it is the job of the pod
that the exporter's labels name, at the time of the sample.

No exporter tells how far a training job is. An application that wants it known exports the gauges under
*applications* below, with a label `job_id` and, where every process has its own, `rank`; the phase is a label
(`training_phase{phase="train"} 1`): startup, train, evaluation or checkpoint. With `training_max_steps` the time left
is foreseen from the progress. The names are Weatherglass's own
convention; others are mapped as below, a step time with `entity = "progress"`. Without a Prometheus the same is sent
with `POST /v1/progress` (see api.md).

## Own mappings

A cluster's own exporter, or another reading of a known metric, is a block in its settings:

```toml
[clusters.prod.metrics."acme_gpu_celsius"]
column = "gpu_temp_c"

[clusters.prod.metrics."acme_fan_power_milliwatts"]
column = "node_power_w"
scale = 0.001
where = { zone = "^rack$" }

[clusters.prod.metrics."DCGM_FI_DEV_XID_ERRORS"]
column = ""            # not read
```

With `column` the block takes the place of all rows of that name; without it, it changes the rows there are. Fields:
`column`, `scale`, `rank`, `mask` (bits of which any makes a flag true), `equals` (value that makes it true), `part`,
`where` (labels that must match: regular expressions), `entity` and `kind`. A wrong name or value stops the program
before it starts, with the valid choices. Columns that can be fed:

"""


def select(table: MetricTable, text: str = "", column: str = "") -> list[Metric]:
    """Rows whose name or exporter contains a text (any case), and that feed a column.

    Args:
        table: The vocabulary.
        text: Part of the name or of the exporter's, or a name as exposed that a `#` or `*` stands for; empty: any.
        column: Name of a column; empty: any.
    """
    wanted = text.lower()
    return [
        row
        for row in table.metrics
        if (wanted in f"{row.name} {row.exporter}".lower() or fnmatchcase(text, row.name.replace(LANE, "*")))
        and (not column or row.column == column)
    ]


def _conditions(row: Metric) -> list[str]:
    words = [f"{label} ~ {pattern}" for label, pattern in row.where]
    words += [f"any bit of {row.mask:#x}"] if row.mask else []
    words += [f"= {row.equals:g}"] if row.equals is not None else []
    words += [f"part {row.part}"] if row.part else []
    words += [f"rank {row.rank}"] if row.rank else []
    return words


def _feeds(row: Metric) -> str:
    return f"{row.entity}.{row.column}" if row.column else f"({row.entity})"


def to_text(rows: Iterable[Metric]) -> str:
    """One line a row: name, what it feeds, scale, kind, the rest."""
    lines = []
    for row in rows:
        is_left_out = row.entity in FED and not row.is_fed
        rest = "; ".join(
            [*(["not read"] if is_left_out else []), *_conditions(row), *([row.meaning] if row.meaning else [])]
        )
        scale = "" if row.scale == 1 else f"×{row.scale:.10g}"
        lines.append(f"{row.name:<62} {_feeds(row):<38} {scale:<12} {row.kind:<20} {rest}".rstrip())
    return "\n".join(lines)


def to_markdown(table: MetricTable) -> str:
    """The text of docs/metrics.md."""
    kinds = [f"- `{kind}`: {meaning}\n" for kind, meaning in KINDS.items()]
    columns = [
        f"- `{entity}`: {', '.join(f'`{name}`' for name in names if not name.startswith('_'))}\n"
        for entity, names in ENTITY_COLUMNS.items()
        if any(not name.startswith("_") for name in names)
    ]
    parts = [_HEAD, *kinds, _MIDDLE, *columns]
    for exporter in dict.fromkeys(row.exporter for row in table.metrics):
        parts.append(f"\n## {exporter}\n\n| metric | feeds | × | kind | remarks |\n|---|---|---|---|---|\n")
        merged: dict[Metric, list[str]] = {}
        for row in table.metrics:
            if row.exporter == exporter:
                merged.setdefault(replace(row, name=""), []).append(row.name)
        parts += [_line(row, names) for row, names in merged.items()]
    return "".join(parts)


def _line(row: Metric, names: list[str]) -> str:
    unit = COLUMNS[row.column].unit if row.column in COLUMNS else ""
    feeds = f"`{_feeds(row)}`" if row.column else row.entity
    remarks = "; ".join([*_conditions(row), *([row.meaning] if row.meaning else [])]).replace("|", r"\|")
    scale = "" if row.scale == 1 else f"{row.scale:.10g}"
    cells = ("<br>".join(f"`{name}`" for name in names), f"{feeds} {unit}".strip(), scale, row.kind, remarks)
    return f"| {' | '.join(cells)} |\n"

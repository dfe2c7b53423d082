"""What slurmrestd's JSON says of jobs and nodes, under the names that sacct, squeue and scontrol print.

Values come flat (`"limit": 5`, to v0.0.38) or with flags (`{"set": true, "infinite": false, "number": 5}`, from v0.0.39
on), states as a word or as a list of words; both are read everywhere. Requests stand in `slurmrestd.py`.
"""

from __future__ import annotations

import math
from typing import Any


def _number(value: Any) -> int | float | None:
    """A number, flat or with flags; None when it is not set or infinite."""
    if isinstance(value, dict):
        return None if value.get("set") is False or value.get("infinite") else _number(value.get("number"))
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = value if isinstance(value, (int, float)) else int(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def object_of(value: Any) -> dict[str, Any]:
    """An object; an empty one where something else stands."""
    return value if isinstance(value, dict) else {}


def list_of(value: Any) -> list[Any]:
    """A list; an empty one where something else stands."""
    return value if isinstance(value, list) else []


def word(value: Any) -> str:
    """Text of a word, of the first of a list, or of a number with flags; empty when there is none."""
    if isinstance(value, list):
        return word(value[0]) if value else ""
    if isinstance(value, dict):
        number = _number(value)
        return "" if number is None else str(number)
    return "" if value is None else str(value)


def _limit(value: Any) -> str:
    return "UNLIMITED" if isinstance(value, dict) and value.get("infinite") else word(value)


def _exit_code(value: Any, state: str) -> str:
    """`exit:signal`. v0.0.38 of slurmdb gives success for a job that failed by itself: that is unknown."""
    if isinstance(value, dict) and ("return_code" in value or "status" in value):
        signal = object_of(value.get("signal"))
        code = int(_number(value.get("return_code")) or 0)
        number = int(_number(signal.get("signal_id", signal.get("id"))) or 0)
        return "" if state == "FAILED" and not code and not number else f"{code}:{number}"
    status = _number(value)
    return "" if status is None else f"{int(status) // 256 % 256}:{int(status) % 128}"


def _printed_id(job_id: str, array_id: Any, task: Any, tasks: Any, het_id: Any, offset: Any) -> str:
    """As Slurm prints it: `123_4`, `123_[1-10%2]`, `123+0`, or the plain id."""
    array, het = _number(array_id), _number(het_id)
    if array:
        number = _number(task)
        return (
            f"{array}_[{tasks}]" if tasks and number is None else f"{array}_{number}" if number is not None else job_id
        )
    return f"{het}+{int(_number(offset) or 0)}" if het else job_id


def _tres(parts: Any) -> str:
    """`cpu=1,mem=1000M,gres/gpu=2` from the list of slurmdb."""
    words = []
    for part in map(object_of, parts if isinstance(parts, list) else []):
        count = _number(part.get("count"))
        if count is not None and count >= 0:
            name = f"{part.get('type')}/{part['name']}" if part.get("name") else str(part.get("type"))
            words.append(f"{name}={count}{'M' if name == 'mem' else ''}")
    return ",".join(words)


def accounted_fields(job: dict[str, Any]) -> dict[str, str]:
    """A job of slurmdb under sacct's names."""
    array, het, when = object_of(job.get("array")), object_of(job.get("het")), object_of(job.get("time"))
    tres, required, state = object_of(job.get("tres")), object_of(job.get("required")), object_of(job.get("state"))
    said, job_id = word(state.get("current")), word(job.get("job_id"))
    # While a job waits it has 0 nodes: TRES tell then how many it asked for.
    return {
        "JobIDRaw": job_id,
        "JobID": _printed_id(
            job_id, array.get("job_id"), array.get("task_id"), array.get("task"), het.get("job_id"),
            het.get("job_offset"),
        ),
        "User": word(job.get("user")), "Account": word(job.get("account")), "Partition": word(job.get("partition")),
        "Submit": word(when.get("submission")), "Eligible": word(when.get("eligible")),
        "Start": word(when.get("start")), "End": word(when.get("end")), "State": said,
        "ElapsedRaw": word(when.get("elapsed")), "SuspendedRaw": word(when.get("suspended")),
        "ExitCode": _exit_code(job.get("exit_code"), said), "RestartCnt": word(job.get("restart_cnt")),
        "NNodes": word(_number(job.get("allocation_nodes")) or None), "ReqCPUS": word(required.get("CPUs")),
        "ReqTRES": _tres(tres.get("requested")), "AllocTRES": _tres(tres.get("allocated")),
        "TimelimitRaw": _limit(when.get("limit")), "NodeList": word(job.get("nodes")),
        "Reason": word(state.get("reason")), "JobName": word(job.get("name")),
        "Constraints": word(job.get("constraints")),
    }  # fmt: skip


def step_fields(job: dict[str, Any]) -> list[dict[str, str]]:
    """Steps of a job of slurmdb under sacct's names."""
    job_id, rows = word(job.get("job_id")), []
    for step in map(object_of, list_of(job.get("steps"))):
        about, when = object_of(step.get("step")), object_of(step.get("time"))
        name = word(about.get("id")).rpartition(".")[2] or word(about.get("name"))
        said = word(step.get("state"))
        most = list_of(object_of(object_of(step.get("tres")).get("consumed")).get("max"))
        memory = [_number(part.get("count")) for part in map(object_of, most) if part.get("type") == "mem"]
        rows.append({
            "JobIDRaw": f"{job_id}.{name}", "Start": word(when.get("start")), "End": word(when.get("end")),
            "State": said, "ExitCode": _exit_code(step.get("exit_code"), said),
            "MaxRSS": str(int(memory[0])) if memory and memory[0] is not None else "",
        })  # fmt: skip
    return rows


def queued_fields(job: dict[str, Any]) -> dict[str, str]:
    """A job of slurmctld under squeue's names, as `slurm_reader.py` calls them."""
    said, job_id = word(job.get("job_state")), word(job.get("job_id"))
    return {
        "JobIDRaw": job_id,
        "JobID": _printed_id(
            job_id, job.get("array_job_id"), job.get("array_task_id"), job.get("array_task_string"),
            job.get("het_job_id"), job.get("het_job_offset"),
        ),
        "User": word(job.get("user_name")), "Account": word(job.get("account")),
        "Partition": word(job.get("partition")), "Submit": word(job.get("submit_time")),
        "Eligible": word(job.get("eligible_time")), "Start": word(job.get("start_time")),
        "End": word(job.get("end_time")), "State": said, "ExitCode": _exit_code(job.get("exit_code"), said),
        "RestartCnt": word(job.get("restart_cnt")), "NNodes": word(job.get("node_count")),
        "NCPUS": word(job.get("cpus")),
        "AllocTRES": word(job.get("tres_alloc_str")) or word(job.get("tres_req_str")),
        "TresPerNode": word(job.get("tres_per_node")), "TresPerJob": word(job.get("tres_per_job")),
        "TimelimitRaw": _limit(job.get("time_limit")), "NodeList": word(job.get("nodes")),
        "Constraints": word(job.get("features")),
        "Reason": word(job.get("state_reason")), "JobName": word(job.get("name")),
    }  # fmt: skip


def node_fields(node: dict[str, Any]) -> dict[str, str]:
    """A node under the names of `node_row`."""
    states, flags = node.get("state"), node.get("state_flags")
    told = [
        *(states if isinstance(states, list) else [states or "UNKNOWN"]),
        *(flags if isinstance(flags, list) else []),
    ]
    found = {
        "node": word(node.get("name")), "state": "+".join(dict.fromkeys(str(one).upper() for one in told)),
        "gres": word(node.get("gres")), "tres": word(node.get("tres")),
    }  # fmt: skip
    reason = word(node.get("reason")).strip()
    return {**found, "reason": reason} if reason else found

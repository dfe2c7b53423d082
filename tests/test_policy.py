"""Reservations, limits, priorities and topology of Slurm: texts of several versions, a real one, and the store."""

from __future__ import annotations

import getpass
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from features.vocabulary import conform
from pipelines.policy import ingest_policy
from pipelines.sources import SourceError
from pipelines.sources.job_states import changed_priorities, job_priorities
from pipelines.sources.slurm import Commands
from pipelines.sources.slurm_limits import assoc_mgr, duration_s, number, partitions, qos, tres
from pipelines.sources.slurm_policy import parse_reservations, parse_sprio, read_policy
from pipelines.store import Store
from tests.services import SLURM_PROGRAMS, Slurm, wait_until

ME = getpass.getuser()
NOW = datetime(2026, 11, 30, 8, tzinfo=UTC)


@pytest.fixture(scope="module")
def limited() -> Iterator[Slurm]:
    """A Slurm that weighs priorities and enforces limits."""
    folder = Path(tempfile.mkdtemp(prefix="wg-slurm-"))
    try:
        cluster = Slurm(folder, nodes=2, parameters={
            "PriorityType": "priority/multifactor", "PriorityWeightAge": "1000", "PriorityWeightFairshare": "1000",
            "PriorityWeightTRES": "gres/gpu=500", "PriorityWeightJobSize": "500", "PriorityWeightPartition": "100",
            "PriorityMaxAge": "1:00", "AccountingStorageEnforce": "limits", "PreemptType": "preempt/qos",
            "PreemptMode": "REQUEUE",
        })  # fmt: skip
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def commands(slurm: Slurm) -> Commands:
    return Commands("alpha", conf=str(slurm.conf))


def told(policies: pl.DataFrame, kind: str, name: str) -> dict[str, object]:
    rows = policies.filter((pl.col("kind") == kind) & (pl.col("name") == name))
    return {
        row["metric"]: row["value"] if row["detail"] is None else row["detail"] for row in rows.iter_rows(named=True)
    }


@pytest.mark.services(*SLURM_PROGRAMS)
def test_a_real_slurm(limited: Slurm, store: Store, tmp_path: Path) -> None:
    slurm = limited
    slurm.run("sacctmgr", "-i", "add", "qos", "high", "set", "priority=10", "GrpTRES=gres/gpu=16,mem=2G",
              "MaxTRESPU=gres/gpu=8,cpu=4", "MaxWall=60", "Preempt=normal", "PreemptMode=requeue",
              "flags=DenyOnLimit")  # fmt: skip
    slurm.run("sacctmgr", "-i", "add", "qos", "odd|name of it")
    slurm.run("sacctmgr", "-i", "add", "account", "lab", "fairshare=5", "GrpTRES=gres/gpu=12")
    slurm.run("sacctmgr", "-i", "add", "user", ME, "account=lab", "MaxJobs=3")
    slurm.run("scontrol", "create", "reservation", "reservationname=cooling", "starttime=now+60minutes", "duration=30",
              "nodes=n1,n2", f"users={ME}", "flags=maint,ignore_jobs")  # fmt: skip
    slurm.run("scontrol", "create", "reservation", "reservationname=course", "starttime=now+120minutes", "duration=30",
              "nodes=n1", "accounts=lab")  # fmt: skip
    busy = slurm.submit("-N2", "--gres=gpu:8", "--exclusive", "--time=10")
    slurm.wait_state(busy, "RUNNING")
    waiting = slurm.submit("-N2", "--gres=gpu:8", "--time=10", "--job-name=9|1e9|0")
    runs = commands(slurm)

    def seen() -> bool:
        policy = read_policy(runs, "alpha", NOW)
        names = set(policy.policies["name"])
        return {"high", f"lab/{ME}", "odd|name of it"} <= names and not policy.priorities.is_empty()

    wait_until(seen, 20, 0.3, "limits in the controller")
    runs.calls = 0
    now = datetime.now(UTC).replace(microsecond=0)
    report = ingest_policy(store, runs, "alpha", now)
    assert runs.calls == 6
    assert report.error is None
    assert report.warnings == []
    assert report.read is not None
    policies = store.query("SELECT * FROM core_policies")
    assert report.policy_rows == policies.height == report.read.policies.height
    batch = told(policies, "partition", "batch")
    assert batch["max_time_s"] == 7 * 86_400
    assert (batch["priority_tier"], batch["total_nodes"], batch["gpus"], batch["preempt_mode"], batch["is_up"]) == (
        1, 2, 16, "REQUEUE", "UP",
    )  # fmt: skip
    assert not batch.keys() & {"max_nodes", "default_time_s", "allow_accounts", "qos"}, "no limit, no row"
    high = told(policies, "qos", "high")
    expected = {
        "priority": 10, "grp_gpus": 16, "grp_memory_mib": 2048, "max_gpus_per_user": 8, "max_cpus_per_user": 4,
        "max_time_s": 3600, "preempt": "normal", "preempt_mode": "REQUEUE", "flags": "DenyOnLimit",
    }  # fmt: skip
    assert high | expected == high
    assert told(policies, "qos", "odd|name of it")["preempt_mode"] == "CLUSTER"
    lab = told(policies, "association", "lab")
    assert (lab["grp_gpus"], lab["shares_raw"]) == (12, 5)
    assert told(policies, "association", f"lab/{ME}")["max_jobs"] == 3
    assert told(policies, "association", "root/root").keys() >= {"fairshare", "shares_norm"}
    rows = {row["name"]: row for row in store.query("SELECT * FROM core_reservations").iter_rows(named=True)}
    assert {name: (row["kind"], row["node_list"], row["users"], row["accounts"]) for name, row in rows.items()} == {
        "cooling": ("maintenance", "n1,n2", ME, None), "course": ("reservation", "n1", None, "lab"),
    }  # fmt: skip
    assert rows["cooling"]["end_time"] - rows["cooling"]["start_time"] == timedelta(minutes=30)
    assert abs(rows["cooling"]["start_time"] - now - timedelta(hours=1)) < timedelta(minutes=1)
    priorities = {row["job_id"]: row for row in report.read.priorities.iter_rows(named=True)}
    assert priorities.keys() == {str(waiting)}
    assert priorities[str(waiting)]["priority"] == float(slurm.job(waiting)["Priority"])
    assert priorities[str(waiting)]["fairshare"] > 0
    assert "gres/gpu=" in priorities[str(waiting)]["tres"]
    kept = store.query("SELECT * FROM core_job_priorities")
    assert kept.height == report.priority_rows == 1
    parts = kept.row(0, named=True)
    said = report.read.priorities.row(0, named=True)
    assert (parts["job_id"], parts["priority"], parts["observed_at"]) == (str(waiting), said["priority"], now)
    names = ("age", "fairshare", "job_size", "partition", "qos", "association", "site", "nice")
    assert {name: parts[f"priority_{name}"] for name in names} == {name: said[name] for name in names}
    assert (parts["priority_partition"], parts["priority_tres"]) == (100, float(str(said["tres"]).split("=")[-1]))
    assert min(parts["priority_job_size"], parts["priority_fairshare"], parts["priority_tres"]) > 0
    # The parts are the whole: slurmctld rounds each of them.
    added = sum(parts[f"priority_{name}"] for name in (*names[:-1], "tres"))
    assert added - parts["priority_nice"] == pytest.approx(parts["priority"], abs=len(names) + 1)
    assert report.read.places.rows() == [("n1", "r1", "p1", None), ("n2", "r1", "p1", None)]

    # Nothing moved, nothing written; then waiting has earned priority, and some is given away. Slurm reckons every few
    # minutes, or when a job is changed.
    assert ingest_policy(store, runs, "alpha", now + timedelta(seconds=1)).priority_rows == 0
    wait_until(lambda: datetime.now(UTC) - now > timedelta(seconds=3), 5)
    slurm.run("scontrol", "update", f"jobid={waiting}", "nice=50")
    assert ingest_policy(store, runs, "alpha", now + timedelta(seconds=5)).priority_rows == 1
    first, later = store.query("SELECT * FROM core_job_priorities ORDER BY observed_at").to_dicts()
    assert (first["job_id"], later["job_id"]) == (str(waiting), str(waiting))
    assert later["priority_age"] > first["priority_age"]
    assert (first["priority_nice"], later["priority_nice"]) == (0, 50)
    assert later["priority"] == float(slurm.job(waiting)["Priority"])
    assert first["priority_partition"] == later["priority_partition"]

    # Nothing new, nothing written; then a change, a limit and a reservation that go.
    again = ingest_policy(store, runs, "alpha", now + timedelta(minutes=1))
    assert (again.reservation_rows, again.policy_rows) == (0, 0)
    slurm.run("sacctmgr", "-i", "modify", "qos", "high", "set", "MaxWall=120", "MaxTRESPU=gres/gpu=-1")
    slurm.run("scontrol", "delete", "reservationname=course")
    wait_until(lambda: "MaxWallPJ=120" in slurm.run("scontrol", "show", "assoc_mgr", "flags=qos"), 20, 0.2)
    third = ingest_policy(store, runs, "alpha", now + timedelta(minutes=2))
    assert third.reservation_rows == 1
    fresh = store.query("SELECT * FROM core_policies WHERE observed_at > ? ORDER BY metric", [now])
    changes = fresh.filter(pl.col("name") == "high").select("metric", "value", "detail").rows()
    assert changes == [("max_gpus_per_user", None, None), ("max_time_s", 7200.0, None)]
    course = store.query("SELECT start_time, end_time FROM core_reservations WHERE name = 'course'").row(0)
    assert course[0] == course[1], "it never began"
    assert ingest_policy(store, runs, "alpha", now + timedelta(minutes=3)).policy_rows == 0

    # The controller goes away: an error, and the store stays.
    count = store.query("SELECT count(*) AS n FROM core_policies").item()
    broken = ingest_policy(store, Commands("alpha", folder=str(tmp_path)), "alpha", now)
    assert broken.error
    assert "scontrol is not in" in broken.error
    assert store.query("SELECT count(*) AS n FROM core_policies").item() == count


@pytest.mark.services(*SLURM_PROGRAMS)
def test_a_slurm_without_priorities_and_limits(slurm: Slurm) -> None:
    slurm.reset()
    policy = read_policy(commands(slurm), "alpha", NOW)
    assert policy.priorities.is_empty()
    assert policy.warnings == []
    assert told(policy.policies, "partition", "batch")["total_nodes"] == 4
    assert conform(policy.policies, "core_policies").equals(policy.policies)
    assert conform(policy.reservations, "core_reservations").equals(policy.reservations)


class Refusing:
    """Commands of a site where this user may see little."""

    def __init__(self, answers: dict[str, str]) -> None:
        self.answers = answers

    def run(self, program: str, *arguments: str) -> str:
        for key, answer in self.answers.items():
            if key in " ".join((program, *arguments)):
                return answer
        raise SourceError(f"alpha: {program} failed (exit 1): Access/permission denied")


def test_what_may_not_be_seen_is_left_out_and_never_taken_for_gone(store: Store) -> None:
    whole = {
        "show partition": "PartitionName=a MaxTime=10 State=UP\n",
        "show reservation": "No reservations in the system\n",
        "assoc_mgr": "", "show topology": "", "sprio": "",
        "sacctmgr": "5|00:00:00|cluster||1.000000||||||||||||||||normal\n",
    }  # fmt: skip
    assert ingest_policy(store, Refusing(whole), "alpha", NOW).warnings == []
    few = {key: whole[key] for key in ("show partition", "show reservation")}
    report = ingest_policy(store, Refusing(few), "alpha", NOW + timedelta(hours=1))
    assert report.error is None
    assert report.policy_rows == 0
    assert len(report.warnings) == 4
    assert all("permission denied; left out" in warning for warning in report.warnings)
    assert "denied" in str(ingest_policy(store, Refusing({}), "alpha", NOW).error)
    odd = read_policy(Refusing(whole | {"sacctmgr": "5|x\n"}), "alpha", NOW)
    assert odd.warnings == ["alpha: 1 line of sacctmgr show qos with another number of fields"]


def test_partitions_of_several_versions() -> None:
    old = (
        "PartitionName=gpu AllowGroups=ALL AllowAccounts=lab,ml AllowQos=ALL Default=NO QoS=gpuq DefaultTime=02:00:00 "
        "GraceTime=30 MaxNodes=8 MaxTime=21-00:00:00 Nodes=cb-[05-20] PriorityTier=5 OverSubscribe=FORCE:2 "
        "PreemptMode=GANG,SUSPEND State=DRAIN TotalCPUs=1544 TotalNodes=73\n"
    )  # 18.08: no TRES
    new = (
        "PartitionName=big AllowGroups=ALL DenyAccounts=guests AllowQos=ALL Default=YES QoS=N/A "
        "MaxNodes=UNLIMITED MaxTime=UNLIMITED PriorityTier=1 PreemptMode=OFF State=UP TotalNodes=4 "
        "TRES=cpu=64,mem=250G,node=4,billing=64,gres/gpu=32,gres/gpu:h100=32 TRESBillingWeights=gres/gpu=1\n"
        "slurm_load_partitions error: later line\n"
    )  # 24.11
    rows = pl.DataFrame(partitions(old + new), orient="row")
    gpu, big = told(rows, "partition", "gpu"), told(rows, "partition", "big")
    assert gpu == {
        "max_time_s": 21 * 86_400, "default_time_s": 7200, "max_nodes": 8, "priority_tier": 5, "grace_time_s": 30,
        "total_nodes": 73, "total_cpus": 1544, "allow_accounts": "lab,ml", "qos": "gpuq", "oversubscribe": "FORCE:2",
        "nodes": "cb-[05-20]", "is_default": 0, "preempt_mode": "GANG,SUSPEND", "is_up": "DRAIN",
    }  # fmt: skip
    assert (big["gpus"], big["gpus:h100"], big["deny_accounts"]) == (32, 32, "guests")
    assert not big.keys() & {"max_time_s", "max_nodes"}


def test_associations_of_several_versions() -> None:
    text = (
        "ClusterName=c Account=lab UserName= Partition= Priority=0 ID=2 SharesRaw/Norm/Level/Factor="
        "68209/0.01/8360303/0.25 ParentAccount=root(1) Lineage=/lab/ DefAssoc=No GrpJobs=20(4) "
        "GrpJobsAccrue=N(15) GrpSubmitJobs=N(20) "
        "GrpWall=600(104967.65) GrpTRES=cpu=N(96),mem=1024(58),gres/gpu=8(6),gres/gpu:a100=4(6) MaxJobs= MaxWallPJ=\n"
        "ClusterName=c Account=my lab UserName=eve x(7) Partition=p Priority=3 ID=4 SharesRaw/Norm/Level/Factor="
        "2147483647/0.00/1/0.00 Lft=2 MaxJobs=10(1) MaxSubmitJobs=4294967295 MaxWallPJ=2880 MaxTRESPJ=gres/gpu=4 "
        "Comment=MaxJobs=1\n"
        "QOS=limited(2) UsageRaw=0.0 GrpJobs=N(0) MaxWallPJ=180 MaxTRESPJ=cpu=8,mem=65536,gres/gpu=1 "
        "PreemptMode=REQUEUE Priority=7 Account Limits= guests={MaxJobsPA=2(1) MaxTRESPA=gres/gpu=18(18)} User Limits= "
        "0={MaxJobsPU=N(1) MaxTRESPU=cpu=N(4),gres/gpu=8(8)}\n"
    )
    rows = pl.DataFrame(assoc_mgr(text), orient="row", infer_schema_length=None)
    assert told(rows, "association", "lab") == {
        "priority": 0, "grp_jobs": 20, "grp_memory_mib": 1024, "grp_gpus": 8, "grp_gpus:a100": 4, "grp_wall_s": 36_000,
        "shares_raw": 68209, "shares_norm": 0.01, "fairshare": 0.25,
    }  # fmt: skip
    eve = told(rows, "association", "my lab/eve x/p")
    limits = {"priority": 3, "max_jobs": 10, "max_time_s": 172_800, "max_gpus_per_job": 4, "shares_raw": 2**31 - 1}
    assert eve | limits == eve
    assert "max_submit_jobs" not in eve, "4294967295 is no limit"
    assert told(rows, "qos", "limited") == {
        "priority": 7, "max_time_s": 10_800, "max_cpus_per_job": 8, "max_memory_mib_per_job": 65_536,
        "max_gpus_per_job": 1, "max_jobs_per_account": 2, "max_gpus_per_account": 18, "max_gpus_per_user": 8,
        "preempt_mode": "REQUEUE",
    }  # fmt: skip


def test_reservations_of_several_versions() -> None:
    text = (
        "ReservationName=a StartTime=2026-11-30T09:00:00 EndTime=2026-11-30T10:00:00 Duration=01:00:00 Nodes=n[1-3,07] "
        "NodeCnt=4 Features=(null) Flags=DAILY,MAINT,SPEC_NODES Users=(null) Accounts=-guests,lab State=ACTIVE "
        "Comment=Flags=FLEX Users=evil\n"
        "ReservationName=b StartTime=1796028111 EndTime=1796029911 Nodes= NodeCnt=0 Flags=MAINTENANCE_NOT Users=x\n"
        "ReservationName=c StartTime=Unknown EndTime=Unknown Nodes=n1\n"
        "ReservationName=d StartTime=1796028111 EndTime=99999999999999 Nodes=n[1- Flags=\n"
        "StartTime=1 of no one\n"
    )
    rows, warnings = parse_reservations(text, "alpha", NOW)
    assert rows.select("name", "kind", "node_list", "users", "accounts", "flags", "end_time").rows() == [
        ("a", "maintenance", "n1,n2,n3,n07", None, "-guests,lab", "DAILY,MAINT,SPEC_NODES",
         datetime(2026, 11, 30, 10, tzinfo=UTC)),
        ("b", "reservation", None, "x", None, "MAINTENANCE_NOT", datetime(2026, 11, 30, 9, 11, 51, tzinfo=UTC)),
        ("d", "reservation", None, None, None, None, None),
    ]  # fmt: skip
    assert len(warnings) == 2
    assert "'c' has no start time" in warnings[0]


def test_priorities_as_a_table() -> None:
    long = (
        "          JOBID PARTITION     USER   PRIORITY       SITE        AGE      ASSOC  FAIRSHARE    JOBSIZE  PARTITION        QOS        NICE                 TRES\n"  # noqa: E501
        "              1 batch         root       1276          0          0          0       1000         27          5          0           0         gres/gpu=250\n"  # noqa: E501
        "              1 debug         root        276          0          0          0       1000         27          0          0           0                    \n"  # noqa: E501
        "           22_7 batch         root       12.5          0          1          0        500         27          0          0         -10                    \n"  # noqa: E501
        "            odd line\n"
    )
    rows = {row["job_id"]: row for row in parse_sprio(long).iter_rows(named=True)}
    assert rows.keys() == {"1", "22_7"}
    assert (rows["1"]["priority"], rows["1"]["partition"], rows["1"]["tres"]) == (1276, 5, "gres/gpu=250")
    assert (rows["22_7"]["nice"], rows["22_7"]["fairshare"], rows["22_7"]["tres"]) == (-10, 500, None)
    assert parse_sprio("").is_empty()
    assert parse_sprio("1|2\nx|1|1|1|1|1|1|1|1|1|\n5|x|1|1|1|1|1|1|1|1|\n").is_empty()


def test_numbers_of_slurm() -> None:
    texts = ("16", "16(3)", "N(0)", "", None, "UNLIMITED", "-1", "0.25", "4294967295", "1e9")
    assert [number(text) for text in texts] == [
        16, 16, None, None, None, None, None, 0.25, None, None,
    ]  # fmt: skip
    assert [duration_s(text) for text in ("7-00:00:00", "01:00:00", "30:00", "60", "1-2", "NONE", "", "UNLIMITED")] == [
        604_800, 3600, 1800, 3600, 93_600, None, None, None,
    ]  # fmt: skip
    assert dict(tres("cpu=4,mem=1.5G,mem=x,gres/gpu:h100=8(2),gres/gpu=N(0),=3,license/a=2")) == {
        "cpus": 4, "memory_mib": 1536, "gpus:h100": 8, "license_a": 2,
    }  # fmt: skip


@given(st.text(alphabet="QOSClusterNamePartition=|(),/ 0123456789N\n\x1f", max_size=300))
def test_any_text_is_survived(text: str) -> None:
    for prefix in (
        "",
        "QOS=x(1) UsageRaw=0 ",
        "PartitionName=",
        "ClusterName=a Account=b UserName=c Partition= Priority=1 ID=1 ",
    ):
        partitions(prefix + text)
        assoc_mgr(prefix + text)
        qos(prefix + text)
        parse_sprio(prefix + text)
        parse_reservations("ReservationName=" + text, "alpha", NOW)


def test_priorities_are_told_when_a_part_has_moved() -> None:
    text = (
        "4|2000|100|0|1000|266|100|0|0|0|cpu=6,gres/gpu=500\n5|1871|0|0|nan|266|inf|x|0|0|N/A\n6|nan|1|1|1|1|1|1|1|0|"
    )
    first = job_priorities(parse_sprio(text), "alpha", NOW)
    assert conform(first, "core_job_priorities").equals(first)
    rows = {row["job_id"]: row for row in first.iter_rows(named=True)}
    assert rows.keys() == {"4", "5"}, "without a priority there is nothing to tell"
    assert rows["4"]["priority_tres"] == 506
    unknown = ("priority_fairshare", "priority_partition", "priority_qos", "priority_tres")
    assert [rows["5"][name] for name in unknown] == [None] * 4, "null, never 0"
    assert changed_priorities(first.clear(), first).equals(first)
    assert changed_priorities(first, first).is_empty()
    for moved, expected in (("2000|100", []), ("2010|110", []), ("2021|121", ["4"]), ("2000|N/A", ["4"])):
        seen = job_priorities(parse_sprio(text.replace("2000|100", moved)), "alpha", NOW + timedelta(minutes=10))
        assert changed_priorities(first, seen)["job_id"].to_list() == expected, moved
    # Slow growth is told when it has come to a hundredth since the last time it was told.
    kept = first
    for minute in range(1, 61):
        text_then = text.replace("2000|100", f"{2000 + minute}|{100 + minute}")
        seen = job_priorities(parse_sprio(text_then), "alpha", NOW + timedelta(minutes=minute))
        kept = pl.concat([kept, changed_priorities(kept, seen)])
    assert kept.filter(pl.col("job_id") == "4")["priority"].to_list() == [2000, 2021, 2042]

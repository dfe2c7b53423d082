"""The command line as an operator meets it: help with an example everywhere, right exit codes, clear errors."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import click
import polars as pl
import pytest
from click.testing import CliRunner

from features.classes import HINT_CLASSES
from features.cleaning import REASONS
from features.vocabulary import conform
from models.registry import Registry
from pipelines import commands as commands_module
from pipelines import retrain, summary, words
from pipelines.asset_metadata import figures
from pipelines.checks import in_words
from pipelines.ingest import Ingested
from pipelines.job_history import JobsIngested, consistent_jobs
from pipelines.publish import Published
from pipelines.settings import Cluster, Settings
from pipelines.steps import ClusterIngested
from pipelines.store import Store
from pipelines.supervisor import cluster_lines
from weatherglass import TASKS, cli

ROOT = Path(__file__).parent.parent


def commands(group, path=()):
    yield path, group
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, (*path, name))


ALL = list(commands(cli))


@pytest.fixture
def run(tmp_path):
    def call(*arguments, config=None, **environment):
        path = tmp_path / "w.toml"
        path.write_text(config if config is not None else f'state_dir = "{tmp_path}/state"\n')
        env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WEATHERGLASS_CONFIG": str(path), **environment}
        argv = [sys.executable, str(ROOT / "weatherglass.py"), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=env, check=False)

    return call


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "weatherglass" for path, _ in ALL])
def test_every_command_has_help_with_an_example(path, command):
    if path == ("simulate",):  # its help is the simulator's own
        assert "weatherglass simulate" in command.epilog
        return
    done = CliRunner().invoke(cli, [*path, "--help"], terminal_width=100)
    assert done.exit_code == 0, done.output
    assert command.help, path
    assert "Examples:" in done.output
    assert f"weatherglass {' '.join(path)}".rstrip() in done.output.replace("--config prod.toml ", "")


def test_wrong_usage_is_two_and_names_the_offender(run):
    for arguments, word in (
        (["bogus"], "bogus"),
        (["run", "--bogus"], "--bogus"),
        (["models", "promote"], "TASK"),
        (["token", "create", "x", "--role", "king"], "king"),
        (["ingest", "--since", "yesterday"], "'yesterday'"),
        (["ingest", "--since", "99999999999d"], "3650d at most"),
        (["ingest", "--since", "0d"], "more than 0s"),
        (["models", "show", "fortune"], "'runtime', 'wait', 'job_failure'"),
        (["models", "promote", "fortune", "v", "--reason", "x"], "'fortune'"),
        (["models", "rollback", "fortune", "--reason", "x"], "'fortune'"),
        (["retrain", "--task", "fortune"], "'runtime', 'wait', 'job_failure'"),
    ):
        done = run(*arguments)
        assert done.returncode == 2, done
        assert word in done.stderr
        assert "Traceback" not in done.stderr


def test_a_wrong_setting_is_two(run):
    done = run("config", "check", config="[api]\nprot = 1\n")
    assert done.returncode == 2
    assert "api.prot = 1" in done.stderr
    assert "did you mean 'port'" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_cluster_says_what_to_add(run):
    for command in ("ingest", "publish", "retrain", "nowcast", "api", "run", "slurm-agent"):
        done = run(command)
        assert done.returncode == 2, done
        assert "[clusters.NAME]" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unknown_cluster_is_named_beside_those_there_are(run):
    done = run("ingest", "--cluster", "b", config='[clusters.a]\njobs = "none"\n')
    assert done.returncode == 2
    assert "no cluster 'b'" in done.stderr
    assert "clusters: a" in done.stderr


def test_a_cluster_without_slurm_has_no_leases_and_the_agent_says_so(run, tmp_path, free_port):
    config = f'state_dir = "{tmp_path}/s"\napi.port = {free_port()}\n[clusters.a]\njobs = "none"\n'
    released = run("slurm-agent", "release", config=config)
    assert released.returncode == 1
    assert released.stderr == ("weatherglass: cluster a has no Slurm (jobs = 'none'): there are no leases to release\n")
    done = run("slurm-agent", "--once", config=config)
    assert done.returncode == 0
    assert "WARNING pipelines.compose: cluster a has no Slurm (jobs = 'none'): the agent can only say" in done.stderr
    assert done.stdout.startswith("a: no fresh hints, nothing is done: http://127.0.0.1:")
    assert "Error" not in done.stdout


def test_a_source_that_is_down_is_one_and_says_where(run, tmp_path, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\nprometheus_url = "{url}"\njobs = "none"\n'
    done = run("ingest", config=config)
    assert done.returncode == 1
    assert url in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_folder_that_cannot_be_made_is_one(run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run("maintain", config=f'state_dir = "{tmp_path}/file/state"\n')
    assert done.returncode == 1
    assert f"{tmp_path}/file/state" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["outcomes", "outcomes --so-far", "quality", "demand", "memory-use", "communication", "retrain",
     "maintain", "models list",
     "checkpoint-advice --gpus 8 --checkpoint-s 60"],
)  # fmt: skip
def test_who_works_on_what_is_there_makes_no_store(tmp_path, command):
    path, state = tmp_path / "w.toml", tmp_path / "gone" / "state"
    path.write_text(f'state_dir = "{state}"\n[clusters.a]\njobs = "none"\n')
    done = CliRunner().invoke(cli, ["--config", str(path), *command.split()])
    assert not state.parent.exists()
    if command != "models list":
        said = str(done.exception)
        assert f"{state}/store/catalogue.sqlite: no store there yet" in said, done.output
        assert "state_dir or [store] url points elsewhere" in said


def test_models_without_a_champion_say_that_the_baseline_is_in_charge(run, tmp_path):
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\njobs = "none"\n'
    listed = run("models", "list", config=config)
    assert listed.returncode == 0
    assert "a runtime: baseline in charge" in listed.stdout
    shown = run("models", "show", "runtime", config=config)
    assert shown.returncode == 1
    assert "no champion for runtime" in shown.stderr


def test_a_token_is_printed_once_and_kept_hashed(run, tmp_path):
    tokens = tmp_path / "tokens.json"
    config = f'[clusters.a]\njobs = "none"\n[api]\ntokens_file = "{tokens}"\n'
    assert "no tokens in" in run("token", "list", config=config).stdout
    done = run("token", "create", "slurm", "--cluster", "a", config=config)
    assert done.returncode == 0
    secret = done.stdout.strip()
    assert len(secret) > 20
    assert secret not in tokens.read_text()
    assert tokens.stat().st_mode & 0o077 == 0
    assert run("token", "create", "slurm", config=config).returncode == 1  # the name is taken
    listed = run("token", "list", config=config).stdout
    assert listed.startswith("slurm  read")
    assert listed.endswith("UTC  a\n")
    assert secret not in listed
    revoked = run("token", "revoke", "slurm", config=config)
    assert (revoked.returncode, revoked.stdout.split(";")[0]) == (0, "slurm: revoked")
    again = run("token", "revoke", "slurm", config=config)
    assert again.returncode == 1
    assert "tokens: none" in again.stderr


def test_a_bad_first_model_is_switched_off_and_stays_off(run, tmp_path):
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\njobs = "none"\n'
    registry = Registry(tmp_path / "s" / "registry" / "a")
    names = [
        registry.save("wait", {"model.txt": text}, {"trained_at": "2026-03-01T12:00:00+00:00"}) for text in (b"1", b"2")
    ]
    for name in names:
        registry.promote("wait", name, "test")
    back = ["models", "rollback", "wait", "--reason", "worse"]
    assert run(*back, config=config).stdout.startswith(f"a wait: champion is now {names[0]}, no longer {names[1]}\n")
    off = run(*back, config=config)
    assert (off.returncode, off.stderr) == (0, "")
    assert "baseline is in charge again" in off.stdout
    assert registry.champion("wait") is None
    again = run(*back, config=config)
    assert again.returncode == 1
    assert "the baseline is in charge already" in again.stderr
    assert "models promote wait VERSION" in again.stderr
    assert registry.champion("wait") is None


def test_a_damaged_pointer_is_rolled_back_and_one_that_cannot_be_read_is_left(run, tmp_path):
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\njobs = "none"\n'
    registry = Registry(tmp_path / "s" / "registry" / "a")
    registry.promote("wait", registry.save("wait", {"model.txt": b"1"}, {}), "test")
    pointer = registry.root / "wait" / "champion.json"
    pointer.write_text("{")
    back = ["models", "rollback", "wait", "--reason", "worse"]
    assert "baseline is in charge again" in run(*back, config=config).stdout
    pointer.unlink()
    pointer.mkdir()
    done = run(*back, config=config)
    assert done.returncode == 1
    assert f"{pointer}: cannot be read: Is a directory" in done.stderr
    assert "damaged" in done.stderr
    assert "rollback" not in done.stderr


def test_a_card_is_told_in_words_and_an_operators_deed_is_his(run, tmp_path):
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\njobs = "none"\n'
    registry = Registry(tmp_path / "s" / "registry" / "a")
    figures = [
        ("male", "", 0.84, 0.8, 0.9), ("male", "last2_key", 1.2, None, None), ("male", "limit", 2.0, None, None),
        ("male_ratio", "last2_key", 0.7, 0.66, 0.75), ("male_ratio", "limit", 0.42, None, None),
        ("pinball_10_50_90_ratio", "quantiles_key", 0.9, None, None),  # of another loss: no rival of the first
        ("remaining_male_60s", "", 0.62, None, None),
    ]  # fmt: skip
    card = {
        "trained_at": "2026-03-01T12:00:00+00:00", "jobs": 2607, "configuration": "0123456789ab", "seed": 1,
        "span": ["2026-01-01T00:00:00+00:00", "2026-03-01T11:00:00+00:00"], "configuration_parts": {"version": 3},
        "decision": "baseline last2_key stays: too little to tell",
        "summary": "2607 jobs, male 0.840 (last2_key 1.200)",
        "metrics": [dict(zip(("metric", "baseline", "value", "low", "high"), f, strict=True)) for f in figures],
    }  # fmt: skip
    version = registry.save("runtime", {"model.txt": b"1"}, card)
    listed = run("models", "list", config=config).stdout
    assert f"    {version}  2607 jobs, male 0.840 (last2_key 1.200)\n    newest: baseline last2_key stays" in listed
    assert "lower is better" in listed
    assert (
        f"newest version: weatherglass models show runtime {version}"
        in run("models", "show", "runtime", config=config).stderr
    )
    promote = ["models", "promote", "runtime", version, "--reason", "better on long jobs"]
    done = run(*promote, config=config).stdout
    assert f"champion is now {version}, before it the baseline\n" in done
    assert "its training had found: baseline last2_key stays: too little to tell" in done
    again = run(*promote, config=config)
    assert (again.returncode, again.stderr) == (1, f"weatherglass: a runtime: {version} is the champion already\n")
    assert [item["actor"] for item in registry.history("runtime")] == ["operator"]
    shown = run("models", "show", "runtime", config=config).stdout
    assert f"a runtime {version}, in charge\n" in shown
    assert "trained 2026-03-01 12:00 UTC on 2,607 jobs of 2026-01-01 00:00 UTC to 2026-03-01 11:00 UTC" in shown
    assert "version 3 of the code, configuration 0123456789ab, seed 1" in shown
    assert "best baseline, last2_key: 0.7 [0.66, 0.75]" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["male", "0.84", "[0.8,", "0.9]", "1.2"] in lines
    assert ["remaining_male_60s", "0.62", "–"] in lines
    assert "by operator: better on long jobs" in shown
    whole = json.loads(run("models", "show", "runtime", "--json", config=config).stdout)
    assert whole["metrics"] == registry.load("runtime").card["metrics"]


def test_tasks_are_those_of_training():
    assert TASKS == commands_module.TASKS == retrain.TASKS


def test_simulate_speaks_of_itself_as_weatherglass_simulate(run):
    done = run("simulate", "history", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: weatherglass simulate history")
    assert "python -m" not in done.stdout
    wrong = run("simulate", "bogus")
    assert wrong.returncode == 2
    assert "weatherglass simulate" in wrong.stderr


def test_no_cluster_points_to_the_demo_where_there_is_one(run, tmp_path):
    assert "demo" not in run("publish").stderr
    (tmp_path / "var" / "demo").mkdir(parents=True)
    (tmp_path / "var" / "demo" / "weatherglass.toml").write_text("")
    assert "the demo's settings: --config var/demo/weatherglass.toml" in run("publish").stderr


def test_nothing_to_publish_and_nothing_read_are_said_plainly(run, tmp_path, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\nprometheus_url = "{url}"\njobs = "none"\n'
    done = run("publish", config=config)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a: no job is pending or running; no node is known yet; 0 rows of the journal loaded")
    read = run("ingest", config=config)
    assert "a: 0 windows, 0 samples, 0 changed jobs; no samples were read" in read.stdout
    assert "\nweatherglass: a: Prometheus at" in f"\n{read.stderr}"
    assert read.stderr.count("Prometheus at") == 1
    assert "connectionpool" not in read.stderr


def test_an_ingest_is_told_in_sentences():
    at = datetime(2026, 3, 1, 10, 40, tzinfo=UTC)

    def told(jobs=None, **telemetry):
        report = ClusterIngested("a", jobs or JobsIngested("a"), Ingested("a", **telemetry))
        return list(summary.in_sentences(report))

    step = {"next_end": at + timedelta(minutes=10), "next_at": at + timedelta(minutes=12)}
    # The first ingest of a cluster whose newest samples lie in a window that is open still.
    empty = {"no_samples": 12}
    assert told(windows=12, findings=empty, mark=at, begin=at - timedelta(hours=2), **step) == [
        "a: 12 windows, 0 samples, 0 changed jobs; nothing was found between 2026-03-01 08:40:00 and "
        "2026-03-01 10:40:00 UTC; the next window ends at 10:50:00 and is read from 10:52:00 on"
    ]
    assert told(mark=at, **step) == [
        "a: 0 windows, 0 samples, 0 changed jobs; all samples before 2026-03-01 10:40:00 UTC are in the store; "
        "the next window ends at 10:50:00 and is read from 10:52:00 on"
    ]
    assert told(mark=at, waits_for="does the nowcast run?", **step)[0].endswith("in the store; does the nowcast run?")
    rows = {"rows": {"core_gpu_samples": 1}, "findings": {"no_samples": 1}, "begin": at - timedelta(minutes=20)}
    assert told(JobsIngested("a", core_rows=1, notes=["a: old"]), windows=2, mark=at, **rows, **step) == [
        "a: 2 windows, 1 sample, 1 changed job; all samples before 2026-03-01 10:40:00 UTC are in the store",
        "  1 window: the window has no sample at all",
        "  old",
    ]
    assert told(error="a: down")[0].endswith("; no samples were read; the next ingest goes on there")
    assert told(error="a: down", mark=at)[0].endswith(
        "no samples were read, all before 2026-03-01 10:40:00 UTC are in the store; the next ingest goes on there"
    )


def test_run_tells_what_ingest_did_with_each_cluster():
    log = "\n".join(
        ["opening the store …", "a: reading samples …", "a: 2 windows, 1 sample", "  12 values: NaN or infinite",
         "b: reading samples …", "b: 3 windows, 0 samples", "  1 window: no sample at all"]
    )  # fmt: skip
    settings = Settings(clusters={"a": Cluster(jobs="none"), "b": Cluster(jobs="none"), "c": Cluster(jobs="none")})
    assert cluster_lines(log, settings) == ["a: 2 windows, 1 sample", "b: 3 windows, 0 samples"]


def test_jobs_of_long_ago_are_said_to_be_left_out(run, tmp_path):
    old = datetime(1997, 8, 29, tzinfo=UTC)
    row = {"job_id": ["1"], "submit_time": [old], "start_time": [old], "end_time": [old], "state": ["COMPLETED"]}
    path = tmp_path / "jobs.parquet"
    pl.DataFrame(row).write_parquet(path)
    trace = tmp_path / "t.parquet"
    pl.DataFrame({"ts": [old], "node": ["n"], "gpu_uuid": ["g"], "gpu_temp_c": [40.0]}).write_parquet(trace)
    config = (
        f'state_dir = "{tmp_path}/s"\n[clusters.a]\ntelemetry = "trace"\ntelemetry_path = "{trace}"\n'
        f'jobs = "trace"\njobs_path = "{path}"\n'
    )
    done = run("ingest", config=config)
    assert done.returncode == 0, done.stderr
    assert f"  the newest of 1 job in {path} is of 1997-08-29, and jobs are read from 20" in done.stdout
    assert f"`weatherglass import jobs {path} --cluster a` reads all" in done.stdout
    assert "nothing was found between" in done.stdout
    assert "a: deriving minutes, hours, faults, labels, slots and the GPUs of jobs …" in done.stderr
    again = run("ingest", config=config)
    assert "a: 0 windows, 0 samples, 0 changed jobs; " in again.stdout
    assert "; the next window ends at " in again.stdout


def test_a_column_that_does_not_exist_is_named_beside_the_one_that_was_meant(run, tmp_path):
    listed = run("metrics", "--column", "gpu_temp")
    assert listed.returncode == 1
    assert "there is no column 'gpu_temp', did you mean gpu_temp_c?" in listed.stderr
    config = '[clusters.a]\nmetrics = { acme = { column = "%s" } }\n'
    near = run("config", "check", config=config % "gpu_temp").stderr
    assert "acme: column = 'gpu_temp': no such column; did you mean gpu_temp_c" in near
    far = run("config", "check", config=config % "zzz").stderr
    assert "no such column; valid: " in far
    assert "gpu_power_w" in far
    assert "_fb_free_bytes" not in near + far


def test_a_metric_that_is_not_read_is_said_not_to_be(run):
    config = '[clusters.a]\nmetrics = { DCGM_FI_DEV_XID_ERRORS = { column = "" } }\n'
    without = run("metrics", "DCGM_FI_DEV_XID_ERRORS", "--cluster", "a", config=config).stdout.splitlines()
    assert len(without) == 1
    assert without[0].endswith("not read")
    assert "not read" not in run("metrics", "DCGM_FI_DEV_XID_ERRORS", config=config).stdout


def test_the_first_line_of_every_help_is_whole():
    out = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert "..." not in out.partition("Commands:")[2]


def test_a_cluster_is_named_once_in_what_is_said():
    published = Published("a", error="a: x")
    assert "not published" in commands_module.published_in_words(published, published, Published("a"))
    assert words.with_name("a", "a: x") == words.with_name("a", "x") == "a: x"
    assert words.without_name("a", "a: x") == "x"


def test_a_public_address_without_tokens_is_refused(run):
    done = run("api", config='[clusters.a]\njobs = "none"\n[api]\nhost = "0.0.0.0"\n')
    assert done.returncode == 1
    assert "weatherglass token" in done.stderr


def test_doctor_finds_what_is_wrong_and_says_what_to_do(run, tmp_path, free_port):
    url = f"http://127.0.0.1:{free_port()}"
    ports = f"[api]\nport = {free_port()}\n[dashboards]\nport = {free_port()}\n"
    config = f'state_dir = "{tmp_path}/s"\n[clusters.a]\nprometheus_url = "{url}"\njobs = "none"\n{ports}'
    done = run("doctor", config=config)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok") and "state folder" in line for line in lines)
    assert any(line.startswith("ok") and "free disk" in line for line in lines)
    assert any(line.startswith("warn  store") and "the first ingest makes it" in line for line in lines)
    assert not (tmp_path / "s" / "store").exists()
    assert any(line.startswith("FAIL") and "a telemetry" in line and url in line for line in lines)
    assert "to mend" in lines[-1]


def test_doctor_warns_of_what_works_and_is_worth_a_look(run, tmp_path, free_port, pages):
    page = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-%s",Hostname="n%s"} 40\n'
    for node in range(3):
        pages.pages[f"/{node}"] = page % (node, node)
    targets = [f"{pages.url}/{node}" for node in range(4)]  # the last one is not there
    path = tmp_path / "jobs.parquet"
    old = datetime(1997, 8, 29, tzinfo=UTC)
    pl.DataFrame({"job_id": ["1"], "submit_time": [old], "end_time": [old]}).write_parquet(path)
    config = (
        f'state_dir = "{tmp_path}/s"\n[clusters.a]\ntelemetry = "scrape"\nscrape_targets = {targets}\n'
        f'jobs = "trace"\njobs_path = "{path}"\n[api]\nport = {free_port()}\n[dashboards]\nport = {free_port()}\n'
    )
    lines = run("doctor", config=config).stdout.splitlines()
    assert any(line.startswith("warn  a telemetry: reachable ") and "3 of 4 targets answer" in line for line in lines)
    assert any(line.startswith("warn  a jobs: recent ") and "weatherglass import jobs" in line for line in lines)
    lacking = [line.split()[3] for line in lines if line.startswith("warn  a telemetry: ") and "not foreseen" in line]
    assert set(lacking) == set(HINT_CLASSES) - {"shortage"}  # these pages tell a temperature and no more
    assert lines[-1] == f"All is well; {3 + len(lacking)} warnings."  # and there is no store yet


def test_ingest_says_what_it_left_out_in_words(run, tmp_path):
    trace = tmp_path / "telemetry.parquet"
    now = datetime.now(UTC).replace(microsecond=0)
    ts = pl.Series("ts", [now - timedelta(minutes=30)] * 2, dtype=pl.Datetime("us", "UTC"))
    rows = {"gpu_uuid": ["GPU-1", "GPU-2"], "gpu_temp_c": [345.0, 40.0], "mem_temp_c": [50.0, 0.0]}
    pl.DataFrame({"ts": ts, "node": ["n1", "n1"], **rows}).write_parquet(trace)
    config = (
        f'state_dir = "{tmp_path}/s"\n[clusters.prod]\ntelemetry = "trace"\ntelemetry_path = "{trace}"\n'
        f'jobs = "sacct-file"\njobs_path = "{tmp_path}/gone.txt"\n'
    )
    done = run("ingest", config=config)
    assert done.returncode == 1  # no jobs: the file is not there
    out = done.stdout.splitlines()
    assert any(
        line.startswith("prod: ") and " windows, 2 samples, 0 changed jobs; all samples before" in line for line in out
    )
    assert "  1 value: physically impossible, as 345 °C or a negative rate" in out
    assert "  1 value: exactly 0 where 0 cannot be, as a memory at 0 °C" in out
    assert "out_of_range" not in done.stdout + done.stderr
    assert "prod: prod" not in done.stdout + done.stderr
    assert "weatherglass: prod: " in done.stderr


def test_words_of_messages():
    assert [words.counted(n, "sample") for n in (0, 1, 2, 1234)] == [
        "0 samples",
        "1 sample",
        "2 samples",
        "1,234 samples",
    ]
    assert words.counted(2, "box", "boxes") == "2 boxes"
    assert words.with_name("prod", "prod: prod: it is down") == "prod: it is down"
    assert words.with_name("prod", "production is down") == "prod: production is down"
    for reason in REASONS:
        said = words.finding(reason, 1)
        assert re.match(r"1 (value|row|window|warning): \S", said)
        assert "_" not in said
    assert words.finding("not_a_number", 2) == "2 values: NaN or infinite"
    assert words.finding("no_samples", 1) == "1 window: the window has no sample at all"
    assert words.finding("live_with_end", 3) == "3 jobs: not ended, yet with an end time; without it now"
    at = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        ("a", "1", at, "PENDING", at, None),
        ("a", "2", at, "RUNNING", at, at),
        ("a", "3", at, "COMPLETED", at, at - timedelta(hours=1)),
        ("a", "4", at, "CANCELLED", None, at - timedelta(hours=1)),
        ("a", "5", None, "COMPLETED", at, at),
    ]
    names = ["cluster", "job_id", "submit_time", "state", "start_time", "end_time"]
    _, found = consistent_jobs(conform(pl.DataFrame(rows, schema=names, orient="row"), "core_jobs"))
    assert set(found) == set(words._OF_JOBS)
    violations = {"types": ["ts"], "keys": 1, "ranges": {"gpu_temp_c": 2}}
    assert list(in_words(violations)) == [
        "the stored type is not the registry's in ts",
        "1 key more than once",
        "gpu_temp_c: 2 values outside of -10 to 125 °C",
    ]
    reports = [
        SimpleNamespace(cluster="a", findings={"zero_is_missing": 2}, error="a: it is down", warnings=["a: odd"])
    ]
    shown = figures(reports, ["findings", "error", "warnings"])
    assert shown["findings"].value == {"a": {"exactly 0 where 0 cannot be, as a memory at 0 °C": 2}}
    assert (shown["error"].value, shown["warnings"].value) == ({"a": "it is down"}, {"a": ["odd"]})


def test_doctor_says_that_a_receivers_port_is_taken(run, tmp_path, free_port, pages):
    config = (
        f'state_dir = "{tmp_path}/s"\n[clusters.prod]\ntelemetry = "remote-write"\njobs = "none"\n'
        f"remote_write_port = {pages.port}\n[api]\nport = {free_port()}\n[dashboards]\nport = {free_port()}\n"
    )
    done = run("doctor", config=config)
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "receiver" in line)
    assert line.startswith("FAIL  prod telemetry: receiver")
    assert f"127.0.0.1:{pages.port} is in use, and what listens there is not the receiver of prod; stop it" in line
    assert line.endswith("or set clusters.prod.remote_write_port")
    assert "everything has arrived" not in done.stdout


def test_doctor_is_content_with_a_cluster_that_is_well(run, tmp_path, free_port):
    trace = tmp_path / "telemetry.parquet"
    now = pl.Series("ts", [0], dtype=pl.Datetime("us", "UTC"))
    pl.DataFrame({"ts": now, "node": ["n1"], "gpu_uuid": ["GPU-1"], "gpu_temp_c": [40.0]}).write_parquet(trace)
    config = (
        f'state_dir = "{tmp_path}/s"\n[clusters.a]\ntelemetry = "trace"\ntelemetry_path = "{trace}"\njobs = "none"\n'
        f"[api]\nport = {free_port()}\n[dashboards]\nport = {free_port()}\n"
    )
    Store.open(f"sqlite:{tmp_path}/s/store/catalogue.sqlite", f"{tmp_path}/s/store/data").close()
    done = run("doctor", config=config)
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("All is well.")

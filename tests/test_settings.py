"""The configuration: refused whole, with name, value and valid choices; documented whole."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipelines import settings_files
from pipelines.example import example
from pipelines.settings import Cluster, Settings, SettingsError, load_settings, parse_settings
from pipelines.settings_checks import remarks
from pipelines.sources import SourceError
from pipelines.sources.inventory import read_inventory
from scheduler_hints.tokens import create_token
from tests.metric_services import make_authority, make_certificate, openssl
from weatherglass import cli

ROOT = Path(__file__).parent.parent


def test_defaults_are_valid_and_embedded():
    settings = parse_settings({}, {})
    assert settings.store_url == "sqlite:var/store/catalogue.sqlite"
    assert settings.clusters == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"api": {"prot": 1}}, ["api.prot = 1", "no such setting", "host, port", "did you mean 'port'"]),
        ({"api": {"port": 0}}, ["api.port = 0", "greater than or equal to 1"]),
        ({"api": {"port": "x"}}, ["api.port = 'x'", "valid integer"]),
        ({"apo": {}}, ["apo", "no such setting", "did you mean 'api'"]),
        (
            {"clusters": {"a": {"telemetry": "graphite"}}},
            ["clusters.a.telemetry = 'graphite'", "'scrape', 'prometheus', 'remote-write' or 'trace'"],
        ),
        (
            {"clusters": {"a": {"telemtry": "scrape"}}},
            ["clusters.a.telemtry", "telemetry, jobs", "did you mean 'telemetry'"],
        ),
        ({"clusters": {"../x": {}}}, ["'../x'", "letters, digits"]),
        (
            {"clusters": {"telemetry": "scrape"}},
            ["clusters.telemetry = 'scrape': is a setting of one cluster, and they have names: write [clusters.NAME]"],
        ),
        ({"clusters": {"a": 1}}, ["clusters.a = 1: the clusters have names: write [clusters.NAME]"]),
        ({"clusters": 1}, ["clusters = 1: the clusters have names: write [clusters.NAME]"]),
        ({"api": 1}, ["api = 1: is a section: write [api]"]),
        (
            {"clusters": {"a": {"metrics": {"x": "gpu_temp_c"}}}},
            ["clusters.a.metrics.x = 'gpu_temp_c': must be a table: write x = {"],
        ),
        (
            {"clusters": {"a": {"prometheus_url": "http://p:9090/prom/api/v1/query"}}},
            ["clusters.a.prometheus_url = 'http://p:9090/prom/api/v1/query': it must be the part before /api/v1/query"],
        ),
        ({"clusters": {"a": {"prometheus_matcher": '{cluster="a"}'}}}, ["prometheus_matcher", "without the braces"]),
        ({"clusters": {"a": {"prometheus_matcher": "cluster=a"}}}, ["prometheus_matcher", "the value wants quotes"]),
        ({"clusters": {"a": {"prometheus_matcher": 'cluster="a" dc="b"'}}}, ["prometheus_matcher", "between braces"]),
        ({"slurm_agent": {"cluster": "b"}}, ["slurm_agent.cluster = 'b'", "no such cluster"]),
        ({"store": {"hints_days": 3}}, ["store.hints_days = 3", "90"]),
        ({"store": {"url": "mysql://x"}}, ["store.url = 'mysql://x'", "sqlite:PATH or postgres:DSN"]),
        ({"store": {"url": "sqlite:"}}, ["store.url = 'sqlite:'", "sqlite:PATH"]),
        ({"clusters": {"a": {"telemetry": "trace"}}}, ["clusters.a.telemetry_path = ''", 'telemetry = "trace"']),
        ({"clusters": {"a": {"jobs": "trace"}}}, ["clusters.a.jobs_path = ''", 'jobs = "trace"', "SWF"]),
        ({"clusters": {"a": {"jobs": "sacct-file"}}}, ["clusters.a.jobs_path = ''", 'jobs = "sacct-file"']),
        ({"clusters": {"a": {"telemetry": "scrape"}}}, ["clusters.a.scrape_targets = []", "sd+URL"]),
        (
            {"clusters": {"a": {"telemetry": "scrape", "scrape_targets": ["http://n1:9400/metrics", "n2:9400"]}}},
            ["clusters.a.scrape_targets = 'n2:9400'", "http://HOST:PORT/metrics", "sd+URL"],
        ),
        (
            {"clusters": {"a": {"telemetry": "scrape", "scrape_targets": ["sd+file:///x"]}}},
            ["clusters.a.scrape_targets = 'sd+file:///x'", "sd+URL"],
        ),
    ],
)
def test_a_wrong_setting_is_refused_with_name_value_and_choices(data, words):
    with pytest.raises(SettingsError) as caught:
        parse_settings(data, {}, "weatherglass.toml")
    assert str(caught.value).startswith("weatherglass.toml: ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("url", ["", "prometheus:9090", "ftp://p", "http://", "http://p:port", "http://[::1"])
def test_a_prometheus_url_that_is_none_is_refused(url):
    with pytest.raises(SettingsError, match=r"clusters\.a\.prometheus_url = .*it must be http://HOST"):
        parse_settings({"clusters": {"a": {"prometheus_url": url}}}, {})


@pytest.mark.parametrize(
    "data",
    [
        {"jobs": "none"},
        {"prometheus_matcher": """cluster="it's", dc =~ 'b|c"', "my.label"!="\\"",x!~`{}`,"""},
        {"prometheus_url": "http://p/api/v1x"},
        {"telemetry": "scrape", "scrape_targets": ["sd+http://127.0.0.1:8703/sd"], "prometheus_url": ""},
        {"telemetry": "scrape", "scrape_targets": ["https://[::1]:9400/metrics"]},
        {"prometheus_url": "https://user:secret@vm.example.org/select/0/prometheus"},
        {"telemetry": "trace", "telemetry_path": "t.parquet", "jobs": "sacct-file", "jobs_path": "sacct.txt"},
    ],
)
def test_what_can_work_is_accepted(data):
    assert set(parse_settings({"clusters": {"a": data}}, {}).clusters) == {"a"}


def test_no_password_is_shown():
    for data in (
        {"store": {"url": "postgresql://me:hunter2@db/wg"}},
        {"store": {"url": "pg:host=db password=hunter2 user=me"}},
        {"clusters": {"a": {"prometheus_url": "htp://me:hunter2@p"}}},
    ):
        with pytest.raises(SettingsError) as caught:
            parse_settings(data, {})
        assert "hunter2" not in str(caught.value)
        assert "***" in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        parse_settings({}, {"WEATHERGLASS_TOKNE": "wg_0123456789ab_hunter2"})
    assert "hunter2" not in str(caught.value)


def test_every_wrong_setting_is_named_at_once():
    with pytest.raises(SettingsError) as caught:
        parse_settings({"api": {"port": 0}, "store": {"threads": 0}}, {})
    assert "api.port" in str(caught.value)
    assert "store.threads" in str(caught.value)


def test_the_environment_overrides_the_file(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text("[api]\nport = 9000\n")
    settings = load_settings(file, {"WEATHERGLASS_API__PORT": "9001", "WEATHERGLASS_STATE_DIR": "/tmp/x"})
    assert settings.api.port == 9001
    assert settings.state_dir == "/tmp/x"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("WEATHERGLASS_API_PORT", "WEATHERGLASS_API__PORT"),
        ("WEATHERGLASS_API__PROT", "WEATHERGLASS_API__PORT"),
        ("WEATHERGLASS_STATE__DIR", "WEATHERGLASS_STATE_DIR"),
        ("WEATHERGLASS_SLURM__AGENT__MODE", "WEATHERGLASS_SLURM_AGENT__MODE"),
        ("WEATHERGLASS_TOKENS", "WEATHERGLASS_TOKEN"),
        ("WEATHERGLASS_CLUSTERS_PROD_JOBS_PATH", "WEATHERGLASS_CLUSTERS__PROD__JOBS_PATH"),
        ("WEATHERGLASS_CLUSTERS__PROD_TELEMETRY", "WEATHERGLASS_CLUSTERS__PROD__TELEMETRY"),
    ],
)
def test_a_misspelt_environment_variable_is_refused_beside_the_one_that_was_meant(name, meant):
    with pytest.raises(SettingsError) as caught:
        parse_settings({}, {name: "9001"})
    assert str(caught.value).startswith(f"{name} = '9001': no such setting")
    assert f"did you mean {meant}?" in str(caught.value)


def test_an_unknown_environment_variable_is_refused():
    with pytest.raises(SettingsError, match=r"^WEATHERGLASS_FOO = 'x': no such setting.*config example"):
        parse_settings({}, {"WEATHERGLASS_FOO": "x"})


def test_a_wrong_value_names_the_variable_it_came_from():
    with pytest.raises(SettingsError) as caught:
        parse_settings(
            {"api": {"host": 1}}, {"WEATHERGLASS_API__PORT": "x", "WEATHERGLASS_LOG_LEVEL": "LOUD"}, "w.toml"
        )
    lines = str(caught.value).splitlines()
    assert "WEATHERGLASS_API__PORT: api.port = 'x': " in "\n".join(lines)
    assert any(line.startswith("WEATHERGLASS_LOG_LEVEL: log_level = 'LOUD'") for line in lines)
    assert any(line.startswith("w.toml: api.host = 1") for line in lines)


def test_a_cluster_can_be_set_from_the_environment_and_the_data_stay_as_they_were():
    data = {"clusters": {"a": {}}}
    settings = parse_settings(data, {"WEATHERGLASS_CLUSTERS__A__TICK_S": "5"})
    assert settings.clusters["a"].tick_s == 5
    assert data == {"clusters": {"a": {}}}


def test_missing_broken_and_unreadable_files_say_so(tmp_path):
    with pytest.raises(SettingsError, match="no such file"):
        load_settings(tmp_path / "none.toml", {})
    broken = tmp_path / "broken.toml"
    broken.write_text("[api\n")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings(broken, {})
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path, {})


def test_an_unknown_cluster_is_named_with_those_there_are():
    settings = parse_settings({"clusters": {"a": {}, "b": {}}}, {})
    with pytest.raises(SettingsError, match=r"no cluster 'c'.*clusters: a, b"):
        settings.cluster("c")


def test_the_example_file_is_the_generated_one_and_valid():
    text = (ROOT / "weatherglass.example.toml").read_text()
    assert text == example()
    loaded = parse_settings(tomllib.loads(text), {})
    assert loaded.model_copy(update={"clusters": {}}) == Settings()


def test_every_setting_is_documented():
    def walk(section, path):
        for name, info in section.model_fields.items():
            if info.default_factory is None:
                assert info.description, f"{path}{name} has no description"
                assert info.description.endswith("."), f"{path}{name}: end the sentence"
            elif name != "clusters":
                walk(info.annotation, f"{name}.")

    walk(Settings, "")


# --- files, certificates, folders, ports: what `config check` looks at ---------------------------------------------


def fault(**settings: Any) -> str:
    """What is wrong with a cluster's settings and their files; the line begins with file and key."""
    with pytest.raises(SettingsError) as caught:
        parse_settings({"clusters": {"a": settings}}, {}, "weatherglass.toml", with_files=True)
    assert str(caught.value).startswith("weatherglass.toml: clusters.a.")
    return str(caught.value).removeprefix("weatherglass.toml: clusters.a.")


def accepted(**settings: Any) -> None:
    parse_settings({"clusters": {"a": settings}}, {}, with_files=True)


def test_every_setting_that_names_a_file_is_looked_at():
    named = {name for name in Cluster.model_fields if re.search("_(file|path|log|conf|bin)$|^inventory$", name)}
    pairs = {f"{part}_{what}_file" for part in settings_files.PAIRS for what in ("cert", "key")}
    looked_at = settings_files.SECRETS, settings_files.AUTHORITIES, settings_files.READ, settings_files.ELSEWHERE, pairs
    assert named == {name for names in looked_at for name in names}
    ports = {f"clusters.a.{name}" for name in Cluster.model_fields if name.endswith("_port")}
    settings = parse_settings({"clusters": {"a": {"telemetry": "remote-write"}}}, {})
    for section in ("api", "dashboards", "dagster"):
        ports |= {f"{section}.{name}" for name in getattr(settings, section).model_fields_set | {"port"}}
    assert ports == {one.setting for one in settings_files.listeners(settings)}


@pytest.mark.parametrize("setting", settings_files.SECRETS)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: it must hold the"),
        (b" \n\n", "is empty: it must hold the"),
        (b"hunter\n2\n", "has 2 lines: it must hold the"),
        (b"hun\x00ter2", "cannot be printed"),
        (b"hunter2\xff", "is no text file"),
        (b"hunter2" * 10_000, "is larger than 64 KiB"),
    ],
)
def test_a_secret_that_is_none_is_refused_and_not_shown(tmp_path, setting, content, words):
    path = tmp_path / "secret"
    path.write_bytes(content)
    more = {"prometheus_username": "u"} if "password" in setting else {}
    text = fault(**{setting: str(path)}, **more)
    assert text.startswith(f"{setting} = '{path}': ")
    assert words in text
    assert "hunter2" not in text
    path.write_bytes(b"hunter2\n")
    accepted(**{setting: str(path)}, **more)
    path.unlink()
    assert "No such file or directory: it must be a file that this user can read" in fault(
        **{setting: str(path)}, **more
    )
    path.mkdir()
    assert "Is a directory" in fault(**{setting: str(path)}, **more)


def test_a_token_stands_alone(tmp_path):
    path = tmp_path / "token"
    for content, words in (
        ("Bearer hunter2", "begins with the word 'Bearer'"),
        ("hunt er2", "holds what no header can carry"),
        ("hünter2", "holds what no header can carry"),
        ("SLURM_JWT=", "holds what no header can carry"),
    ):
        path.write_text(content)
        assert words in fault(prometheus_token_file=str(path))
    path.write_text("SLURM_JWT=hunter2\n")
    accepted(slurm_rest_token_file=str(path))
    assert settings_files.read_secret(str(path), is_token=True) == "hunter2"
    path.write_text("correct horse, bättery\n")
    accepted(prometheus_username="u", prometheus_password_file=str(path))


@pytest.mark.services("openssl")
def test_certificates_and_keys_are_pem_and_fit(tmp_path):
    ours = make_authority(tmp_path, "ours")
    pem, key = (str(path) for path in make_certificate(tmp_path, "ours", "server", "IP:127.0.0.1"))
    _, foreign = make_certificate(tmp_path, "ours", "other", "IP:127.0.0.1")
    text, der, both, locked = (tmp_path / name for name in ("text", "der", "both.pem", "locked.key"))
    text.write_text("no certificate\n")
    openssl("x509", "-in", pem, "-outform", "DER", "-out", der)
    both.write_text(Path(pem).read_text() + Path(key).read_text())
    openssl("pkey", "-in", key, "-aes256", "-passout", "pass:hunter2", "-out", locked)
    accepted(prometheus_ca_file=str(ours), prometheus_cert_file=pem, prometheus_key_file=key)
    accepted(prometheus_cert_file=str(both), remote_write_cert_file=str(both))
    for path in (text, der, Path(key)):
        assert fault(prometheus_ca_file=str(path)).startswith(
            f"prometheus_ca_file = '{path}': holds no certificate in PEM form"
        )
    for part in settings_files.PAIRS:
        cert_file, key_file = f"{part}_cert_file", f"{part}_key_file"
        for given, words in (
            ({cert_file: str(text)}, f"{cert_file} = '{text}': holds no certificate in PEM form"),
            ({cert_file: pem}, f"{cert_file} = '{pem}': holds no private key in PEM form"),
            ({cert_file: pem, key_file: str(text)}, f"{key_file} = '{text}': holds no private key in PEM form"),
            ({cert_file: pem, key_file: str(foreign)}, f"{key_file} = '{foreign}': is not the key of '{pem}'"),
            ({cert_file: pem, key_file: str(locked)}, f"{key_file} = '{locked}': is locked with a passphrase"),
            ({cert_file: pem, key_file: f"{key}.gone"}, f"{key_file} = '{key}.gone': No such file"),
            ({cert_file: f"{pem}.gone", key_file: key}, f"{cert_file} = '{pem}.gone': No such file"),
        ):
            assert fault(**given).startswith(words)
    with pytest.raises(SettingsError, match=r"remote_write_cert_file = '': remote_write_key_file needs it"):
        parse_settings({"clusters": {"a": {"telemetry": "remote-write", "remote_write_key_file": key}}}, {})


def test_a_broken_inventory_is_refused_as_ingest_refuses_it(tmp_path):
    path = tmp_path / "inventory.csv"
    path.write_text("node,rack,gpus\nn1,r1,8\nn[2,r1,8\nn3,r1,many\n")
    text = fault(inventory=str(path))
    with pytest.raises(SourceError) as caught:
        read_inventory(str(path))
    said = str(caught.value).removeprefix(f"inventory {path}: ")
    assert text == f"inventory = '{path}': {said}"
    assert "line 3: " in text
    assert "line 4: gpus = 'many'" in text
    path.write_text("node,rack\nn[1-4],r1\n")
    accepted(inventory=str(path))
    assert "no such file" in fault(inventory=str(tmp_path / "none.csv"))


def test_files_and_folders_that_are_not_there_are_named(tmp_path):
    gone = str(tmp_path / "gone")
    for setting in settings_files.READ:
        assert fault(**{setting: gone}).startswith(f"{setting} = '{gone}': No such file or directory")
    (tmp_path / "a.parquet").write_bytes(b"")
    accepted(telemetry_path=str(tmp_path / "*.parquet"), jobs_path=str(tmp_path))
    assert "slurm_bin = " in fault(slurm_bin=gone)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("scontrol", "squeue"):
        (tools / name).touch(0o755)
    assert "lacks sacct" in fault(slurm_bin=str(tools))
    (tools / "sacct").touch(0o755)
    accepted(slurm_bin=str(tools))


def test_what_is_written_to_must_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for data, words in (
        ({"state_dir": f"{tmp_path}/file/var"}, f"state_dir = '{tmp_path}/file/var': {tmp_path}/file is in the way"),
        ({"store": {"data_path": f"{tmp_path}/file"}}, f"store.data_path = '{tmp_path}/file': {tmp_path}/file is in"),
        ({"store": {"url": f"sqlite:{tmp_path}"}}, f"{tmp_path} is a folder: name a file in it"),
        ({"store": {"url": f"sqlite:{tmp_path}/file/c.sqlite"}}, f"{tmp_path}/file is in the way"),
    ):
        with pytest.raises(SettingsError) as caught:
            parse_settings(data, {}, "w.toml", with_files=True)
        assert words in str(caught.value)
    if os.geteuid():
        with pytest.raises(SettingsError, match="state_dir = '/proc/var': this user may not write in /proc"):
            parse_settings({"state_dir": "/proc/var"}, {}, with_files=True)


def test_tokens_of_the_api_are_read(tmp_path):
    path = tmp_path / "tokens.json"
    data = {"api": {"tokens_file": str(path)}}
    with pytest.raises(SettingsError, match=r"api\.tokens_file = .*no such file: make it with `weatherglass token"):
        parse_settings(data, {}, with_files=True)
    path.write_text("{}")
    with pytest.raises(SettingsError, match=r"api\.tokens_file = '.*tokens.json': not a tokens file"):
        parse_settings(data, {}, with_files=True)
    path.unlink()
    create_token(path, "dashboards", "read")
    parse_settings(data, {}, with_files=True)


def test_two_parts_do_not_share_a_port():
    def conflict(**data: Any) -> str:
        with pytest.raises(SettingsError) as caught:
            parse_settings(data, {}, "w.toml", with_files=True)
        return str(caught.value)

    push = {"telemetry": "remote-write"}
    one = conflict(clusters={"a": {**push, "remote_write_port": 8700}})
    assert one.startswith("w.toml: clusters.a.remote_write_port = 8700: api.port has it already; choose another, not ")
    assert "8700 (api.port), 8701 (dashboards.port), 8702 (dagster.port)" in one
    two = conflict(clusters={"a": push, "b": push, "c": push})
    assert "clusters.b.remote_write_port = 8704: clusters.a.remote_write_port has it already" in two
    assert "clusters.c.remote_write_port = 8704: clusters.a.remote_write_port has it already" in two
    assert "dashboards.port = 8700: api.port has it" in conflict(dashboards={"port": 8700})
    assert "dagster.port = 8701: dashboards.port has it" in conflict(dagster={"port": 8701, "host": "0.0.0.0"})
    assert "api.port has it" in conflict(
        clusters={"a": {**push, "remote_write_host": "localhost", "remote_write_port": 8700}}
    )
    for data in (
        {"dagster": {"port": 8701, "enabled": False}},
        {"clusters": {"a": push, "b": {**push, "remote_write_host": "::1"}}},
        {"clusters": {"a": {"remote_write_port": 8700}}},
    ):
        parse_settings(data, {}, with_files=True)
        parse_settings(data, {})


def test_one_metric_written_in_two_forms_is_said_in_words_of_toml(tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(
        '[clusters.prod]\nmetrics = { acme = { column = "gpu_temp_c" } }\n'
        '[clusters.prod.metrics."other"]\ncolumn = "gpu_temp_c"\n'
    )
    with pytest.raises(SettingsError) as caught:
        load_settings(file, {})
    assert "clusters.prod.metrics.other twice (at line 3, column 31): it, or the table it stands in" in str(
        caught.value
    )
    assert "('" not in str(caught.value)


def test_an_api_open_to_others_wants_tokens(tmp_path):
    wide = {"host": "0.0.0.0"}
    with pytest.raises(SettingsError, match=r"api\.host = '0\.0\.0\.0': is open to others, .*api\.insecure = true"):
        parse_settings({"api": wide}, {}, with_files=True)
    parse_settings({"api": {**wide, "insecure": True}}, {}, with_files=True)
    create_token(tmp_path / "tokens.json", "dashboards", "read")
    parse_settings({"api": {**wide, "tokens_file": str(tmp_path / "tokens.json")}}, {}, with_files=True)
    parse_settings({"api": wide}, {})  # `weatherglass api` says so itself, and can be told --insecure


def test_what_works_and_is_hardly_meant_is_remarked():
    def of(**data: Any) -> list[str]:
        return list(remarks(parse_settings({"clusters": {"a": {}}, **data}, {})))

    assert of() == []
    assert of(clusters={"a": {"tick_s": 1, "exporter_interval_s": 60}}) == [
        "clusters.a.tick_s = 1: samples come every 60 s only (exporter_interval_s), so that most ticks see nothing "
        "new: make them equal"
    ]
    found = of(ingest={"window_s": 1, "overlap_s": 600})
    assert [text.split(":")[0] for text in found] == ["ingest.window_s = 1", "ingest.window_s = 1"]
    assert "every sample is read several times" in found[0]
    assert "windows are empty" in found[1]


def test_config_check_tells_remarks_and_that_there_is_no_cluster(tmp_path, monkeypatch):
    config = tmp_path / "w.toml"
    monkeypatch.setenv("WEATHERGLASS_CONFIG", "")  # the command sets it

    def check(text: str) -> Any:
        config.write_text(text)
        return CliRunner().invoke(cli, ["--config", str(config), "config", "check"])

    result = check("[clusters.a]\ntick_s = 1\n")
    assert result.exit_code == 0
    assert result.output.startswith("settings are right; cluster: a\n  look at clusters.a.tick_s = 1: samples come")
    assert isinstance(check("").exception, SettingsError)
    assert str(check("").exception).startswith("no cluster in the settings; add a [clusters.NAME] block")


def test_config_check_names_file_key_and_every_fault_at_once(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("")
    config = tmp_path / "prod.toml"
    config.write_text(
        f'[clusters.a]\nprometheus_token_file = "{tmp_path}/token"\nprometheus_ca_file = "{tmp_path}/token"\n'
    )
    monkeypatch.setenv("WEATHERGLASS_CONFIG", "")  # the command sets it
    monkeypatch.setenv("WEATHERGLASS_CLUSTERS__A__INVENTORY", f"{tmp_path}/none.csv")
    result = CliRunner().invoke(cli, ["--config", str(config), "config", "check"])
    lines = str(result.exception).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(f"{config}: clusters.a.prometheus_token_file = '{tmp_path}/token': is empty")
    assert lines[1].startswith(f"{config}: clusters.a.prometheus_ca_file = '{tmp_path}/token': holds no certificate")
    assert (
        lines[2] == f"WEATHERGLASS_CLUSTERS__A__INVENTORY: clusters.a.inventory = '{tmp_path}/none.csv': no such file"
    )
    load_settings(config, {})  # what runs is not kept from running by files that are away


def test_a_class_may_be_published_from_a_probability_of_its_own():
    asked = {"clusters": {"alpha": {}}, "hints": {"publish_by_class": {"thermal_throttle": 0.7}}}
    assert parse_settings(asked, {}).hints.publish_by_class == {"thermal_throttle": 0.7}
    asked["hints"]["publish_by_class"] = {"heat": 0.7}
    with pytest.raises(SettingsError, match=r"no bottleneck class 'heat'; classes: thermal_throttle"):
        parse_settings(asked, {})


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("hints", {"publish_by_class": {"thermal_throttle": True}}),
        ("hints", {"window_confidence": True}),
        ("api", {"port": True}),
        ("ingest", {"limits": {"H100": {"slowdown_temp_c": True}}}),
    ],
)
def test_true_is_no_number(section, setting):
    (name,) = setting
    with pytest.raises(SettingsError, match=rf"w.toml: {section}\.{name} = .*: true and false are no numbers"):
        parse_settings({section: setting}, {}, "w.toml")
    (variable,) = (f"WEATHERGLASS_{section}__{name}".upper(),)
    with pytest.raises(SettingsError, match=f"{variable}: .*no numbers"):
        parse_settings({}, {variable: "true" if not isinstance(setting[name], dict) else '{ "H100" = { a = true } }'})

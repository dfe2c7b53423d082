"""The configuration: refused whole, with name, value and valid choices; documented whole."""

import tomllib
from pathlib import Path

import pytest

from pipelines.example import example
from pipelines.settings import Settings, SettingsError, load_settings, parse_settings

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

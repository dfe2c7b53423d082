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
            ["clusters.a.telemetry = 'graphite'", "'scrape', 'prometheus' or 'trace'"],
        ),
        (
            {"clusters": {"a": {"telemtry": "scrape"}}},
            ["clusters.a.telemtry", "telemetry, jobs", "did you mean 'telemetry'"],
        ),
        ({"clusters": {"../x": {}}}, ["'../x'", "letters, digits"]),
        ({"slurm_agent": {"cluster": "b"}}, ["slurm_agent.cluster = 'b'", "no such cluster"]),
        ({"store": {"hints_days": 3}}, ["store.hints_days = 3", "90"]),
    ],
)
def test_a_wrong_setting_is_refused_with_name_value_and_choices(data, words):
    with pytest.raises(SettingsError) as caught:
        parse_settings(data, {}, "weatherglass.toml")
    assert str(caught.value).startswith("weatherglass.toml: ")
    for word in words:
        assert word in str(caught.value)


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


def test_a_misspelt_environment_variable_is_refused():
    with pytest.raises(SettingsError, match="api.prot"):
        parse_settings({}, {"WEATHERGLASS_API__PROT": "9001"})


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
    with pytest.raises(SettingsError, match="no cluster 'c'.*clusters: a, b"):
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

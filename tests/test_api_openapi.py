"""The API's own document names every route, and real answers and real errors fit it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_hints.api import create_app
from scheduler_hints.dispatch import Dispatcher
from scheduler_hints.memory_estimates import MemoryRequest
from scheduler_hints.queries import PARAMETERS
from scheduler_hints.reloader import ShardStore
from tests.hints_support import QUANTILES, Reply, ask, check_schema, forecast_of, job, publish
from weatherglass import cli


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Dispatcher:
    root = tmp_path_factory.mktemp("published")
    publish(root, ttl_s=600)
    publish(root, "beta", jobs=[job(cluster="beta", remaining=QUANTILES, p_fail=None)], ttl_s=600)
    (root / "alpha" / "nowcast-status.json").write_text('{"ticks": 3}')
    store = ShardStore(root, ["alpha", "beta"])
    app = create_app(root, (), store=store, forecast_runtimes=lambda cluster, jobs: forecast_of(jobs))
    store.refresh()
    return app


@pytest.fixture(scope="module")
def document(app: Dispatcher) -> dict[str, Any]:
    return ask(app, "/openapi.json").json()


def _check(document: dict[str, Any], reply: Reply, path: str, method: str = "get") -> None:
    responses = document["paths"][path][method]["responses"]
    assert str(reply.status) in responses, f"{method} {path} answers {reply.status}, which the document does not name"
    schema = responses[str(reply.status)]["content"]["application/json"]["schema"]
    check_schema(reply.json(), schema, document["components"]["schemas"])


def test_the_document_names_every_route_and_method_and_no_other(app: Dispatcher, document: dict[str, Any]) -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in app.cold.routes  # type: ignore[attr-defined]  # ty: ignore[unresolved-attribute]
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_it_is_openapi_3_1_with_every_reference_resolved(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    text = json.dumps(document)
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names == set(document["components"]["schemas"])
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)


def test_parameters_are_those_the_api_takes(document: dict[str, Any]) -> None:
    for kind, parameters in PARAMETERS.items():
        written = document["paths"][f"/v1/{kind}"]["get"]["parameters"]
        assert [one["name"] for one in written] == [parameter.name for parameter in parameters]


def test_examples_of_parameters_are_taken_and_examples_of_answers_fit(
    app: Dispatcher, document: dict[str, Any]
) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for one in operation.get("parameters", []):
                if one["in"] == "query":
                    reply = ask(app, path, f"{one['name']}={one['example']}")
                    assert reply.status == 200, (path, one["name"], reply.body)
                    check_schema(one["example"], one["schema"], {})
            bodies = [response["content"] for response in operation["responses"].values() if "content" in response]
            bodies += [operation["requestBody"]["content"]] if "requestBody" in operation else []
            for content in bodies:
                for media in content.values():
                    if "example" in media:
                        check_schema(media["example"], media["schema"], document["components"]["schemas"])
            if "requestBody" in operation:
                example = operation["requestBody"]["content"]["application/json"]["example"]
                headers = {"content-type": "application/json"}
                reply = ask(app, path, method=method.upper(), body=json.dumps(example).encode(), headers=headers)
                assert reply.status == 200, reply.body


@pytest.mark.parametrize("path", [*(f"/v1/{kind}" for kind in PARAMETERS), "/v1/status", "/healthz", "/readyz"])
def test_real_answers_fit(app: Dispatcher, document: dict[str, Any], path: str) -> None:
    reply = ask(app, path)
    assert reply.status == 200
    _check(document, reply, path)


def test_real_answers_about_jobs_and_forecasts_fit(app: Dispatcher, document: dict[str, Any]) -> None:
    for cluster in ("alpha", "beta"):
        _check(document, ask(app, f"/v1/jobs/{cluster}/4711"), "/v1/jobs/{cluster}/{job_id}")
    body = json.dumps({"cluster": "alpha", "jobs": [{"user": "ada"}]}).encode()
    _check(document, ask(app, "/v1/runtime-forecasts", method="POST", body=body), "/v1/runtime-forecasts", "post")


def test_real_errors_fit(app: Dispatcher, document: dict[str, Any]) -> None:
    for query in ("x=1", "cluster=gamma", "node=" + "n" * 3000):
        _check(document, ask(app, "/v1/bottlenecks", query), "/v1/bottlenecks")
    _check(document, ask(app, "/v1/bottlenecks", "cluster=beta"), "/v1/bottlenecks")
    _check(document, ask(app, "/v1/jobs/alpha/1"), "/v1/jobs/{cluster}/{job_id}")
    _check(document, ask(app, "/v1/jobs/gamma/1"), "/v1/jobs/{cluster}/{job_id}")
    for body in (b"{", b"{}", b" " * 3_000_000):
        reply = ask(app, "/v1/runtime-forecasts", method="POST", body=body)
        _check(document, reply, "/v1/runtime-forecasts", "post")


def test_the_checker_can_fail(document: dict[str, Any], app: Dispatcher) -> None:
    answer = ask(app, "/v1/bottlenecks").json()
    schema = document["paths"]["/v1/bottlenecks"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    components = document["components"]["schemas"]
    for spoil in (
        {"version": "1"}, {"expires_in_s": None}, {"stale_shards": {}}, {"surprise": 1},
        {"generated_at": "2026-03-14T00:00"}, {"items": [answer["items"][0] | {"expected_onset": "soon"}]},
        {"items": [answer["items"][0] | {"scope": "galaxy"}]},
    ):  # fmt: skip
        with pytest.raises((AssertionError, ValueError)):
            check_schema(answer | spoil, schema, components)
    del answer["version"]
    with pytest.raises(AssertionError):
        check_schema(answer, schema, components)


def test_the_written_guide_names_every_route_and_parameter(document: dict[str, Any]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for path, methods in document["paths"].items():
        assert path in text, path
        for operation in methods.values():
            for one in operation.get("parameters", []):
                assert f"`{one['name']}`" in text, (path, one["name"])


GUIDE = (Path(__file__).parent.parent / "docs" / "api.md").read_text()


def _section(path: str) -> str:
    return re.split(r"\n#{2,3} ", GUIDE[GUIDE.index(f"### `POST {path}`") + 4 :])[0]


@pytest.mark.parametrize("path", ["/v1/runtime-forecasts", "/v1/memory-estimates", "/v1/progress"])
def test_the_written_guide_names_the_fields_that_a_body_has_and_no_other(document: dict[str, Any], path: str) -> None:
    schemas, text = document["components"]["schemas"], _section(path)
    operation = document["paths"][path]["post"]

    def fields_of(schema: Any) -> set[str]:
        """Names of all properties that a schema leads to."""
        if isinstance(schema, list):
            return set().union(*map(fields_of, schema))
        if not isinstance(schema, dict):
            return set()
        if "$ref" in schema:
            return fields_of(schemas[schema["$ref"].rsplit("/", 1)[1]])
        own = schema.get("properties", {})
        return set(own) | fields_of(list(own.values())) | fields_of([schema.get("items"), schema.get("anyOf")])

    asked = fields_of(operation["requestBody"]["content"]["application/json"]["schema"])
    said = fields_of(operation["responses"]["200"]["content"]["application/json"]["schema"])
    enumerated = {str(one) for schema in schemas.values() for one in re.findall(r'"(\w+)"', json.dumps(schema))}
    others = {"no_forecast", "journal_full", "core_job_progress", "send_progress", "job_ttl_s"}
    named = set(re.findall(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+)+)`", text)) - others
    assert named <= asked | said | enumerated, "what the API does not know"
    in_examples = {name for body in re.findall(r"-d '(\{.*?\})'", text, re.DOTALL) for name in _names(json.loads(body))}
    assert asked <= set(re.findall(r"`(\w+)`", text)) | in_examples, "what the guide leaves out"


def _names(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_names, value))
    return set(value) | _names(list(value.values())) if isinstance(value, dict) else set()


def test_bodies_of_the_written_guide_are_taken(app: Dispatcher) -> None:
    header = r"'Content-Type: application/json' \\\s+"
    bodies = re.findall(rf"\"\$URL(/v1/[\w-]+)\" -H {header}-d '(\{{.*?\}})'", GUIDE, re.DOTALL)
    taken = {"/v1/runtime-forecasts", "/v1/memory-estimates", "/v1/progress", "/v1/silences"}
    taken |= {"/v1/placements", "/v1/feedback"}
    assert {path for path, _ in bodies} == taken
    for path, body in bodies:
        reply = ask(app, path, method="POST", body=body.encode(), headers={"content-type": "application/json"})
        assert reply.status == 200, (path, reply.body)
    for query in re.findall(r'"\$URL(/v1/[\w-]+\?[^"]*)"', GUIDE):
        path, _, query = query.partition("?")
        assert ask(app, path, query).status == 200, (path, query)


def test_the_written_guide_tells_fields_from_options_with_their_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", _section("/v1/memory-estimates"), re.MULTILINE)
    fields = {field.name: field for field in msgspec.structs.fields(MemoryRequest)}
    assert [name for name, _, _ in rows] == list(fields)
    options = {one.name: [*one.opts, *one.secondary_opts] for one in cli.commands["estimate-memory"].params}
    for name, written, default in rows:
        assert re.findall(r"`(--[\w-]+)`", written) == options.get(name.replace("memory_bytes", "memory"), []), name
        assert (fields[name].default is msgspec.NODEFAULT) == (not default), name
        if fields[name].default not in (None, msgspec.NODEFAULT):
            assert msgspec.json.encode(fields[name].default).decode().strip('"') == default, name

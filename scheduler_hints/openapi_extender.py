"""Paths of the Kubernetes scheduler extender in the OpenAPI document; the routes are in `extender_routes.py`."""

from __future__ import annotations

from typing import Any

from scheduler_hints.errors import BadRequestError, BodyTimeoutError, BodyTooLargeError, UnsupportedMediaError
from scheduler_hints.extender import FilterResult, HostPriority
from scheduler_hints.openapi_parts import errors_of, json_of, parameter_of
from scheduler_hints.queries import Parameter

_ASKED = {"Pod": {"metadata": {"name": "train-0"}}, "Nodes": None, "NodeNames": ["n1", "n7"]}
_ARGS = {
    "type": "object",
    "description": "ExtenderArgs of k8s.io/kube-scheduler/extender/v1: NodeNames, or Nodes whole.",
    "properties": {
        "Pod": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "Nodes": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "NodeNames": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    },
}
_HEADER = {
    "X-Weatherglass": {
        "description": "fresh; or why every candidate was passed: stale, or the code of an error",
        "schema": {"type": "string"},
    }
}


def extender_paths(of: dict[str, Any]) -> dict[str, Any]:
    """Paths by name.

    Args:
        of: Schema of each type by its name in the document.
    """
    failed = {"n7": "Weatherglass: thermal throttling within 60 s with probability 0.91 (hint bn-5f)"}
    cluster = parameter_of(Parameter("cluster", "string", "Name of the cluster.", "alpha"), "path")
    verbs = {
        "filter": ("Passes candidate nodes but those in trouble", of["filter"], FilterResult(None, ["n1"], failed)),
        "prioritize": (
            "Likes candidate nodes by how safe they are, 0 to 10",
            {"type": "array", "items": of["priority"]},
            [HostPriority("n1", 10), HostPriority("n7", 1)],
        ),
    }
    errors = errors_of(BadRequestError, BodyTimeoutError, BodyTooLargeError, UnsupportedMediaError)
    paths: dict[str, Any] = {}
    for verb, (summary, schema, example) in verbs.items():
        said = "With the names that kube-scheduler's Go types have; whatever is wrong with us: every candidate"
        answer = {"description": said, "headers": _HEADER, "content": json_of(schema, example)}
        operation = {
            "summary": f"{summary}, to a Kubernetes scheduler",
            "requestBody": {"required": True, "content": json_of(_ARGS, _ASKED)},
            "responses": {"200": answer} | errors,
        }
        paths[f"/k8s/{verb}"] = {"post": operation}
        paths[f"/k8s/{{cluster}}/{verb}"] = {"post": operation | {"parameters": [cluster]}}
    return paths

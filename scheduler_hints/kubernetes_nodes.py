"""Nodes of a Kubernetes cluster as the agent reads and writes them, by the official client.

Here belongs the API server; what is written stands in `kubernetes_agent.py`. A write names the version of the node that
it was made for: one that somebody else has changed meanwhile is refused, and no taint of theirs is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

_PAGE = 500
_TIMEOUT_S = (5.0, 20.0)  # to connect, and to read


class KubernetesError(Exception):
    """The API server could not be asked; the message names it and what it said."""


class ConflictError(KubernetesError):
    """The node has changed since it was read, or is gone."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node.

    Attributes:
        name: Its name.
        version: `resourceVersion` that was read.
        annotations: All of them.
        taints: All of them, as JSON objects.
        rack: Value of the label that names racks; None: it has none.
        is_cordoned: Somebody keeps pods off it.
    """

    name: str
    version: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[dict[str, Any]] = ()
    rack: str | None = None
    is_cordoned: bool = False


class NodeApi(Protocol):
    """What the agent needs of a cluster."""

    def nodes(self) -> list[Node]: ...
    def patch(self, node: Node, annotations: Mapping[str, str | None], taints: Sequence[dict[str, Any]]) -> None: ...


class KubernetesNodes:
    """Nodes by the API server.

    Args:
        kubeconfig: File of the access; empty: that of the pod this runs in.
        rack_label: Label of nodes that names their rack.

    Raises:
        KubernetesError: There is no access to be read.
    """

    def __init__(self, kubeconfig: str = "", rack_label: str = "topology.kubernetes.io/rack") -> None:
        from kubernetes import client, config

        try:
            configuration = client.Configuration()
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=configuration)
            else:
                config.load_incluster_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            words = f"kubeconfig {kubeconfig}" if kubeconfig else "no kubernetes.kubeconfig is set, and"
            raise KubernetesError(f"{words}: {error}") from error
        configuration.retries = 0  # the next round asks again
        self.url = str(configuration.host)
        self._rack_label = rack_label
        self._client = client.ApiClient(configuration)
        self._api = client.CoreV1Api(self._client)

    def nodes(self) -> list[Node]:
        """Every node.

        Raises:
            KubernetesError: They could not be read.
        """
        found: list[Node] = []
        following: str | None = None
        while True:
            page: Any = self._call(self._api.list_node, limit=_PAGE, _continue=following)
            found += [self._node(item) for item in page.items]
            following = page.metadata._continue
            if not following:
                return found

    def _node(self, item: Any) -> Node:
        taints = self._client.sanitize_for_serialization(item.spec.taints or [])
        return Node(
            item.metadata.name,
            item.metadata.resource_version,
            item.metadata.annotations or {},
            taints,
            (item.metadata.labels or {}).get(self._rack_label),
            bool(item.spec.unschedulable),
        )

    def patch(self, node: Node, annotations: Mapping[str, str | None], taints: Sequence[dict[str, Any]]) -> None:
        """Write annotations (None removes one) and, where they differ, all taints of a node.

        Raises:
            ConflictError: It has changed since, or is gone.
            KubernetesError: It could not be written.
        """
        body: dict[str, Any] = {"metadata": {"resourceVersion": node.version, "annotations": dict(annotations)}}
        if list(taints) != list(node.taints):
            body["spec"] = {"taints": list(taints)}
        self._call(self._api.patch_node, node.name, body)

    def _call(self, method: Any, *arguments: Any, **options: Any) -> Any:
        from kubernetes.client.exceptions import ApiException, OpenApiException
        from urllib3.exceptions import HTTPError

        try:
            return method(*arguments, _request_timeout=_TIMEOUT_S, **options)
        except ApiException as error:
            kind = ConflictError if error.status in (404, 409) else KubernetesError
            raise kind(f"{self.url} answers {error.status} {error.reason}") from error
        except (OpenApiException, HTTPError, OSError) as error:
            raise KubernetesError(f"{self.url}: {error}") from error

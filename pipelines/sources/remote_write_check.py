"""What an operator should know of a receiver of remote-write: does it listen, does something come, how to send to it.

Asked by processes that do not listen themselves; nothing is started or changed here.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from features.metrics import MetricTable
from pipelines.doctor_ports import bind_error
from pipelines.progress import span
from pipelines.sources import Fetched, Finding, SourceError
from pipelines.sources.metric_findings import metric_gaps, told_columns
from pipelines.sources.remote_write_address import Address
from pipelines.sources.remote_write_keeper import ReceiverState, read_receiver
from pipelines.sources.remote_write_progress import IntakeState, read_state
from pipelines.words import counted

_SILENT_S = 60.0
_ASK_S = 3.0


def findings(
    address: Address,
    folder: Path,
    interval_s: float,
    table: MetricTable,
    fetch: Callable[[datetime, datetime], Fetched],
) -> list[Finding]:
    """All there is to say of a cluster's receiver.

    Args:
        address: Where it should listen.
        folder: Folder of its sample log.
        interval_s: Interval of scrapes, s.
        table: The vocabulary.
        fetch: Reads the log.
    """
    found: list[Finding] = []
    for name, look in (("token", address.read_token), ("certificate", address.check_certificate)):
        try:
            look()
        except SourceError as error:
            found.append((name, False, str(error)))
    is_up, text = receiver_state(address, folder)
    found.append(("receiver", is_up, text))
    state, now_s = read_state(folder), time.time()
    if state is None or not state.senders:
        hint = "put this into prometheus.yml:\n" + sender_config(address, table)
        first = "" if is_up else "mend the receiver, then "
        return [*found, ("reachable", False, f"nothing has arrived yet: {first}{hint}")]
    heard_s = now_s - max(sender.heard_ms for sender in state.senders.values()) / 1000
    is_heard = heard_s <= max(_SILENT_S, 4 * interval_s)
    who = f"{counted(len(state.senders), 'sender')} ({', '.join(list(state.senders)[:5])})"
    hint = ""
    if not is_heard:
        config = f"does prometheus.yml hold this?\n{sender_config(address, table)}"
        hint = f": {config}" if is_up else ": mend the receiver first"
    text = f"{who}, {state.series} series, heard {span(heard_s)} ago{hint}"
    found += [("reachable", is_heard, text), *_lag(state, now_s, interval_s, is_heard=is_heard)]
    for key, noun, what in (
        ("absurd_time", "sample", "with an impossible time: check the exporters' clocks"),
        ("too_old", "sample", "too old to be kept"),
        ("refused", "request", "could not be read: the log of the nowcast names the sender"),
    ):
        if number := state.counts.get(key):
            found.append((key, False, f"{counted(number, noun)} {what}"))
    return [*found, *_metrics(fetch, interval_s, table)] if is_heard else found


def receiver_state(address: Address, folder: Path) -> tuple[bool, str]:
    """Whether this cluster's receiver listens, and in words what does or why not."""
    from pipelines.sources.remote_write_server import PATH

    said, where = read_receiver(folder), f"{address.host}:{address.port}"
    url = f"{address.base_url()}{PATH}"
    if said is not None and said.host != socket.gethostname() and said.is_fresh(time.time()):
        if said.instance:
            return not said.problem, f"on the machine {said.host}: {said.problem or f'listens on port {said.port}'}"
        return False, f"on the machine {said.host}: {said.problem}"
    last = f"; the nowcast says: {said.problem}" if said and said.problem and said.is_fresh(time.time()) else ""
    answer = _ask(address)
    if answer is None:
        reason = bind_error(address.host, address.port)
        if reason is None:
            start = f"`weatherglass run`, or `weatherglass nowcast --cluster {address.cluster}`"
            return False, f"nothing listens on {where}: start the nowcast ({start}){last}"
        if reason.errno != errno.EADDRINUSE:
            host, port = address.setting("host"), address.setting("port")
            return False, f"cannot listen on {where}: {reason.strerror}; set {host} or {port}"
    if not _is_ours(answer, said):
        find = f"`ss -ltnp 'sport = :{address.port}'` names it"
        return False, (
            f"{where} is in use, and what listens there is not the receiver of {address.cluster}; stop it ({find}) or "
            f"set {address.setting('port')}"
        )
    assert said is not None
    return not said.problem, f"listens on {url}, process {said.pid}{last}"


def _is_ours(answer: str | None, said: ReceiverState | None) -> bool:
    from pipelines.sources.remote_write_server import ready_text

    return bool(answer and said and said.instance and answer.strip() == ready_text(said.instance))


def _ask(address: Address) -> str | None:
    """What answers at the receiver's place; empty: something without an answer; None: nothing listens there."""
    import httpx

    from pipelines.sources.remote_write_server import READY

    try:
        # Its certificate is for the senders' name of it; that it is ours its answer tells.
        return httpx.get(address.base_url() + READY, timeout=_ASK_S, trust_env=False, verify=False).text
    except httpx.ConnectError as error:
        # TLS that fails counts as a connection error too.
        return None if bind_error(address.host, address.port) is None or "SSL" not in str(error) else ""
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return ""


def _lag(state: IntakeState, now_s: float, interval_s: float, *, is_heard: bool) -> Iterator[Finding]:
    if state.complete_ms is None:
        return
    lag_s, limit_s = now_s - state.complete_ms / 1000, 4 * interval_s + _SILENT_S
    if is_heard and lag_s <= limit_s:
        yield "fresh", True, f"everything has arrived up to {span(lag_s)} ago"
    elif is_heard:
        slow = "the sender catches up after an outage, or is too slow: raise max_samples_per_send and max_shards"
        yield "fresh", False, f"everything has arrived up to {span(lag_s)} ago: {slow}"
    else:
        at = datetime.fromtimestamp(state.complete_ms / 1000, UTC)
        kept = "what came since waits at the senders, which keep it for about two hours"
        yield "fresh", False, f"complete only up to {at:%Y-%m-%d %H:%M} UTC, {span(lag_s)} ago: {kept}"


def _metrics(
    fetch: Callable[[datetime, datetime], Fetched], interval_s: float, table: MetricTable
) -> Iterator[Finding]:
    now = datetime.now(UTC)
    try:
        fetched = fetch(now - timedelta(seconds=max(120.0, 4 * interval_s)), now + timedelta(seconds=5))
    except SourceError as error:  # pods of Kubernetes could not be asked for
        yield "metrics", False, str(error)
        return
    gpus = fetched.gpu["gpu_uuid"].n_unique() if len(fetched.gpu) else 0
    lacking = ""
    if not gpus:
        lacking = f": none of {len(table.by_name)} known metrics came lately; do write_relabel_configs drop them?"
    yield "metrics", gpus > 0, f"{counted(gpus, 'GPU')}{lacking}"
    if gpus:
        yield from metric_gaps(told_columns(fetched))


def sender_config(address: Address, table: MetricTable) -> str:
    """The block of prometheus.yml that sends to a receiver."""
    from pipelines.sources.remote_write_server import PATH

    url = address.base_url()
    if address.host in ("0.0.0.0", "::", ""):
        url = f"{url.partition('://')[0]}://THIS_HOST:{address.port}"
    token = "    authorization: {credentials_file: FILE_WITH_THE_SAME_TOKEN}\n" if address.token_file else ""
    tls = "    tls_config: {ca_file: PEM_OF_THE_AUTHORITY_THAT_SIGNED_THE_CERTIFICATE}\n" if address.cert_file else ""
    return (
        "remote_write:\n"
        f"  - url: {url}{PATH}\n{token}{tls}"
        "    queue_config: {max_samples_per_send: 5000, capacity: 20000, batch_send_deadline: 2s}\n"
        "    # Only what is read here:\n"
        "    write_relabel_configs:\n"
        f"      - {{source_labels: [__name__], regex: '{_wanted_names(table)}', action: keep}}\n"
    )


def _wanted_names(table: MetricTable) -> str:
    """Regular expression of the beginnings of all metrics that are read, and `up`."""
    beginnings = set()
    for name in table.variants:
        first, second = [*name.split("_"), ""][:2]
        beginnings.add(f"{first}_{second}" if first == "node" else first)
    return "|".join(["up", *(f"{one}_.*" for one in sorted(beginnings))])

"""`weatherglass doctor`: looks at everything Weatherglass depends on and says what to do about what is wrong.

It writes little: it makes the state folder where it is missing, and the spool folder of a `scrape` source; files that
it tries these folders with are removed again. All else is read and asked.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.commands import TASKS
from pipelines.settings import Settings
from pipelines.settings_checks import remarks
from pipelines.words import counted

if TYPE_CHECKING:
    from scheduler_hints.tokens import TokenStore

_MIN_FREE_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: What was looked at.
        is_ok: Whether it is as it should be.
        message: What was seen; for a fault also what to do.
        is_odd: It works, and something about it is worth a look; the message says what.
        is_skipped: It was not looked at, for something before it is wrong; the message says what.
    """

    name: str
    is_ok: bool
    message: str
    is_odd: bool = False
    is_skipped: bool = False

    @property
    def word(self) -> tuple[str, int]:
        """How it is shown in a column of four letters, and the number of its colour on a terminal."""
        if self.is_skipped:
            return "skip", 33
        if not self.is_ok:
            return "FAIL", 31
        return ("warn", 33) if self.is_odd else ("ok  ", 32)


def check_state(settings: Settings) -> Iterator[Finding]:
    state = settings.state
    try:
        state.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=state):
            pass
        yield Finding("state folder", True, f"{state} is writable")
    except OSError as error:
        yield Finding("state folder", False, f"{state}: {error.strerror}; create it for this user or set state_dir")
        return
    free = shutil.disk_usage(state).free
    text = f"{free / 2**30:.1f} GiB free on {state}"
    if free < _MIN_FREE_BYTES:
        text += f"; at least {_MIN_FREE_BYTES / 2**30:.0f} GiB are needed: free some or move state_dir"
    yield Finding("free disk", free >= _MIN_FREE_BYTES, text)


def check_store(settings: Settings) -> Iterator[Finding]:
    from pipelines.compose import open_store
    from pipelines.store import StoreNotMade

    kind, _, path = settings.store_url.partition(":")
    places = [Path(path).parent, Path(path)] if kind == "sqlite" else []
    places += [Path(settings.store_data_path)] if "://" not in settings.store_data_path else []
    for place in places:
        there = next(one for one in (place.absolute(), *place.absolute().parents) if one.exists())
        if not os.access(there, os.W_OK) or (there != place.absolute() and not there.is_dir()):
            text = f"{place}: {there} is not writable; set [store] or state_dir to a folder this user may write"
            yield Finding("store", False, text)
            return
    try:
        store = open_store(settings, read_only=True)
    except StoreNotMade as error:
        yield Finding("store", True, str(error), is_odd=True)
        return
    try:
        for name, is_ok, message in store.check():
            yield Finding(f"store: {name.removeprefix('store ')}", is_ok, message)
    finally:
        store.close()


def check_source(settings: Settings, cluster: str, what: str) -> Iterator[Finding]:
    from contextlib import closing

    from pipelines.sources import SourceError, build_jobs, build_telemetry

    chosen = settings.clusters[cluster]
    if what == "jobs" and chosen.jobs == "none":
        with closing(build_jobs(cluster, chosen, settings.state)) as inventory:
            nodes = len(inventory.live().nodes)
        without = "no scheduler is configured: no shortage, window or job is foreseen"
        text = f"{without}; {counted(nodes, 'node')} in the inventory"
        yield Finding(f"{cluster} jobs", True, text)
        return
    build = build_telemetry if what == "telemetry" else build_jobs
    try:
        source = build(cluster, chosen, settings.state)
    except SourceError as error:
        yield Finding(f"{cluster} {what}", False, str(error).removeprefix(f"{cluster}: "))
        return
    with closing(source):
        findings = source.check()
    for name, is_ok, message in findings:
        text = message.removeprefix(f"{cluster}: ")
        if what == "jobs" and chosen.jobs == "slurm" and name == "reachable" and is_ok is False:
            text = _slurm_advice(cluster, text)
        yield Finding(f"{cluster} {what}: {name}", is_ok is not False, text, is_odd=is_ok is None)


def _slurm_advice(cluster: str, text: str) -> str:
    """The first line of what Slurm said, and what to do."""
    said = text.splitlines()[0] if text else "no message"
    # Slurm's tools print one error after another, and the source joins the lines; each begins with the tool's name.
    tool, mark, rest = said.partition(": error: ")
    first = rest.split(" scontrol: ")[0].split(" sinfo: ")[0].split(" squeue: ")[0]
    said = f"{tool}{mark}{first}".rstrip(" ;.")
    return f"{said}; set clusters.{cluster}.slurm_conf or slurm_bin, or run where scontrol works"


def check_ports(settings: Settings) -> Iterator[Finding]:
    from pipelines.doctor_ports import look_at_ports

    for setting, is_ok, text in look_at_ports(settings):
        yield Finding(setting, is_ok, text)


def check_tokens(settings: Settings) -> Iterator[Finding]:
    from scheduler_hints.tokens import TokenError, TokenStore, is_loopback

    if not settings.api.tokens_file:
        loopback = is_loopback(settings.api.host)
        open_text = f"none, and api.host = {settings.api.host!r}"
        if loopback:
            text = "none; the API listens on loopback only"
        elif settings.api.insecure:
            text = f"{open_text}: everyone who reaches it may ask (api.insecure = true)"
        else:
            text = (
                f"{open_text}: set api.tokens_file and make some with `weatherglass token create NAME`, or set "
                "api.insecure = true"
            )
        yield Finding("tokens", loopback or settings.api.insecure, text)
        return
    path = Path(settings.api.tokens_file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        tokens = TokenStore(path)
    except OSError as error:
        yield Finding("tokens", False, f"{path}: {error.strerror}; make it with `weatherglass token create NAME`")
        return
    except TokenError as error:
        yield Finding("tokens", False, str(error))
        return
    is_private = not mode & 0o077
    fix = "" if is_private else f"; others can read it: chmod 600 {path}"
    yield Finding("tokens", is_private, f"{path} has {counted(len(tokens), 'token')} and mode {mode:04o}{fix}")
    yield _own_token(tokens)


def _own_token(tokens: TokenStore) -> Finding:
    """Whether the parts of Weatherglass that ask the hints API have a token that it knows."""
    from scheduler_hints.errors import UnauthorizedError

    name, secret = "WEATHERGLASS_TOKEN", os.environ.get("WEATHERGLASS_TOKEN")
    needed = "the dashboards and the Slurm agent need a read token in WEATHERGLASS_TOKEN"
    make = "make one with `weatherglass token create dashboards`"
    if not secret:
        return Finding(name, False, f"not set; {needed}: {make}")
    try:
        owner = tokens.authenticate(f"Bearer {secret}".encode())
    except UnauthorizedError:
        return Finding(name, False, f"not a token of {tokens.path}; {needed}: {make}")
    return Finding(name, True, f"the token {owner.name!r}, role {owner.role}")


def check_registry(settings: Settings) -> Iterator[Finding]:
    from models.registry import Registry, RegistryError, RegistryUnreadableError

    for name in settings.clusters:
        registry = Registry(settings.registry / name)
        for task in TASKS:
            try:
                version = registry.champion(task)
                if version is None:
                    yield Finding(f"{name} model: {task}", True, "none yet; the baseline is in charge")
                else:
                    registry.load(task)
                    yield Finding(f"{name} model: {task}", True, version)
            except RegistryUnreadableError as error:
                yield Finding(f"{name} model: {task}", False, str(error))
            except RegistryError as error:
                advice = f"weatherglass models rollback {task} --cluster {name} --reason damaged"
                yield Finding(f"{name} model: {task}", False, f"{error}; try: {advice}")


_Check = tuple[str, Callable[[], Iterator[Finding]]]


def findings(settings: Settings) -> Iterator[Finding]:
    """Everything there is to look at, in order; a check that breaks is itself a finding."""
    has_state = True
    for finding in _guarded("state folder", lambda: check_state(settings)):
        has_state &= finding.is_ok or finding.name != "state folder"
        yield finding
    is_elsewhere = "{state_dir}" not in settings.store.url + settings.store.data_path
    if has_state or is_elsewhere:
        yield from _guarded("store", lambda: check_store(settings))
    if not has_state:
        what = "models" if is_elsewhere else "store, models"
        yield Finding(what, True, "not looked at: mend the state folder first", is_skipped=True)
    for remark in remarks(settings):
        yield Finding("settings", True, remark, is_odd=True)
    if not settings.clusters:
        yield Finding("clusters", False, "none in the settings; add a [clusters.NAME] block")
    checks: list[_Check] = []
    for cluster in settings.clusters:
        for what in ("telemetry", "jobs"):
            checks.append(
                (f"{cluster} {what}", lambda cluster=cluster, what=what: check_source(settings, cluster, what))
            )
    if has_state:
        checks.append(("models", lambda: check_registry(settings)))
    checks += [("ports", lambda: check_ports(settings)), ("tokens", lambda: check_tokens(settings))]
    for name, check in checks:
        yield from _guarded(name, check)


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check, and one more when it breaks. Our own errors speak for themselves; others are named."""
    from pipelines.sources import SourceError
    from pipelines.store_errors import StoreError

    try:
        yield from check()
    except (SourceError, StoreError) as error:
        yield Finding(name, False, str(error))
    except OSError as error:
        yield Finding(name, False, f"{error.filename or name}: {error.strerror or error}")
    except Exception as error:
        yield Finding(name, False, f"{type(error).__name__}: {error}")


def examine(settings: Settings) -> int:
    """Print every finding.

    Returns:
        How many things are wrong; what is only worth a look, or was not looked at, is not among them.
    """
    colour = os.isatty(1) and "NO_COLOR" not in os.environ
    failed = skipped = odd = 0
    for finding in findings(settings):
        failed += not finding.is_ok
        skipped += finding.is_skipped
        odd += finding.is_odd
        word, number = finding.word
        if colour:
            word = f"\033[{number}m{word}\033[0m"
        print(f"{word}  {finding.name:<28}  {finding.message}", flush=True)
    unseen = f"; {skipped} not looked at" if skipped else ""
    curious = f"; {counted(odd, 'warning')}" if odd else ""
    print(f"\n{failed} to mend{curious}{unseen}." if failed else f"\nAll is well{curious}.")
    return failed

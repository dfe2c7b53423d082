"""The printed form of the registry for the command line: versions, cards, promotions and rollbacks in words.

What is kept and how a champion changes stands in `models/registry.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from models.registry import NoEarlierChampionError, Registry, RegistryError, RegistryUnreadableError
from pipelines.commands import TASKS
from pipelines.compose import CommandError, clusters_of, one_cluster
from pipelines.settings import Settings

ACTOR = "operator"
_LOSSES = (
    "male: mean |ln(forecast ÷ actual)|; brier: mean squared error of odds; lower is better. In brackets the best "
    "baseline on the same held-out jobs. A block is a user's jobs of one day, a node, or a job's hour: one piece of "
    "evidence. * is in charge."
)


def list_models(settings: Settings, cluster: str | None) -> None:
    """Print every version of every task, the champion marked, and why the one in charge is."""
    is_any = False
    for name in clusters_of(settings, cluster):
        registry = _registry(settings, name)
        for task in TASKS:
            cards = registry.versions(task)
            is_any = is_any or bool(cards)
            for line in _listed(registry, name, task, cards):
                print(line)
    print(_LOSSES if is_any else "no model has been trained yet; `weatherglass retrain` does, and so does every night")


def _listed(registry: Registry, cluster: str, task: str, cards: list[dict[str, Any]]) -> Iterator[str]:
    try:
        champion = registry.champion(task)
    except RegistryUnreadableError:
        raise
    except RegistryError as error:
        yield f"{cluster} {task}: {error}"
        champion = registry.present(task)
    deeds = registry.history(task)
    yield f"{cluster} {task}: {champion or 'baseline in charge'}{f', {_deed(deeds[-1])}' if deeds else ''}"
    for card in cards:
        mark = "*" if card["version"] == champion else " "
        yield f"  {mark} {card['version']}  {card.get('error') or card.get('summary', '')}".rstrip()
    if cards and cards[0]["version"] != champion and cards[0].get("decision"):
        yield f"    newest: {cards[0]['decision']}"


def show_model(settings: Settings, cluster: str | None, task: str, version: str | None, *, as_json: bool) -> None:
    """Print what is known of a version, or of the champion: in words, or its whole card as JSON.

    Raises:
        CommandError: No version was named and the baseline is in charge.
    """
    name = one_cluster(settings, cluster)
    registry = _registry(settings, name)
    if version is None and registry.champion(task) is None:
        names = [card["version"] for card in registry.versions(task)]
        newest = f"; the newest version: weatherglass models show {task} {names[0]}" if names else ""
        raise CommandError(f"{name} has no champion for {task}: its baseline is in charge{newest}")
    loaded = registry.load(task, version)
    if as_json:
        print(json.dumps(loaded.card, indent=2, default=str))
        return
    in_charge = registry.present(task)
    fate = "in charge" if loaded.version == in_charge else f"not in charge: {in_charge or 'the baseline'} is"
    print(f"{name} {task} {loaded.version}, {fate}")
    for line in _described(loaded.card):
        print(f"  {line}")
    for deed in registry.history(task):
        if loaded.version in (deed.get("version"), deed.get("previous")):
            print(f"  {_deed(deed)}")
    print("  whole card: --json")


def card_in_words(settings: Settings, cluster: str, task: str, version: str) -> list[str]:
    """What a version learnt from, the decision over it and its figures beside the best baseline's, a line each.

    Raises:
        RegistryError: There is no such version, or it is damaged.
    """
    return list(_described(_registry(settings, cluster).load(task, version).card))


def _described(card: Mapping[str, Any]) -> Iterator[str]:
    learnt = next((f"{card[key]:,} {key}" for key in ("jobs", "samples", "faults") if key in card), "data")
    span = card.get("span") or ["?", "?"]
    yield f"trained {_time(card['trained_at'])} on {learnt} of {_time(span[0])} to {_time(span[1])}"
    parts = card.get("configuration_parts") or {}
    made = [f"version {parts['version']} of the code" if "version" in parts else "code of a release without versions"]
    made += [f"configuration {card['configuration']}"] if "configuration" in card else []
    made += [f"seed {card['seed']}"] if "seed" in card else []
    made += [f"snapshot {card['snapshot_id']}"] if card.get("snapshot_id") is not None else []
    yield f"made by {', '.join(made)}"
    if card.get("decision"):
        yield f"decision: {card['decision']}"
    yield from _figures(card.get("metrics") or [])


def _figures(metrics: list[Mapping[str, Any]]) -> Iterator[str]:
    """Each figure of the model beside that of the baseline with the best ratio."""
    own = {item["metric"]: item for item in metrics if not item["baseline"]}
    ratios = [item for item in metrics if item["metric"].endswith("_ratio") and item["baseline"] and item["value"]]
    deciding = [
        item for item in ratios if item["metric"] == ratios[0]["metric"]
    ]  # that of the primary loss comes first
    ratio = max(deciding, key=lambda item: item["value"], default=None)
    best = ratio["baseline"] if ratio else ""
    other = {item["metric"]: item for item in metrics if item["baseline"] == best}
    if ratio is not None:
        yield f"loss ÷ that of the best baseline, {best}: {_figure(ratio)}"
    names = [name for name in own | other if not name.endswith("_ratio")]
    rows = [(name, _figure(own.get(name)), _figure(other.get(name))) for name in names]
    if not rows:
        return
    widths = [max(len(row[k]) for row in [*rows, ("figure", "model", "")]) for k in range(2)]
    yield f"{'figure':<{widths[0]}}  {'model':<{widths[1]}}  {best or 'baseline'}, on the held-out part; 95 % intervals"
    for row in rows:
        yield f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip()


def _figure(item: Mapping[str, Any] | None) -> str:
    if item is None or item["value"] is None:
        return "–"
    low, high = item.get("low"), item.get("high")
    shown = f"{item['value']:.4g}"
    return shown if low is None or high is None else f"{shown} [{low:.4g}, {high:.4g}]"


def promote_model(settings: Settings, cluster: str | None, task: str, version: str, reason: str) -> None:
    """Make a version the champion; the nowcast and the next publication take it over by themselves.

    Raises:
        CommandError: It is the champion already.
    """
    name = one_cluster(settings, cluster)
    registry = _registry(settings, name)
    before = registry.present(task)
    decision = registry.load(task, version).card.get("decision")
    try:
        if registry.champion(task) == version:
            raise CommandError(f"{name} {task}: {version} is the champion already")
    except RegistryUnreadableError:
        raise
    except RegistryError:  # the pointer is damaged: it is written anew below
        pass
    registry.promote(task, version, reason, actor=ACTOR, expected=before)
    print(f"{name} {task}: champion is now {version}, before it {before or 'the baseline'}")
    if decision:
        print(f"  its training had found: {decision}")
    print(
        f"  taken over at the next publication; back: weatherglass models rollback {task} --cluster {name} --reason WHY"
    )


def rollback_model(settings: Settings, cluster: str | None, task: str, reason: str) -> None:
    """Take the champion out of charge: the one before it comes back; where there is none, the baseline.

    Raises:
        CommandError: The baseline is in charge already.
    """
    name = one_cluster(settings, cluster)
    registry = _registry(settings, name)
    try:
        is_baseline = registry.champion(task) is None
    except RegistryUnreadableError:
        raise
    except RegistryError:  # the pointer is damaged: it is written anew below
        is_baseline = False
    if is_baseline:
        raise CommandError(
            f"{name} {task}: the baseline is in charge already; to put a model in charge: weatherglass models promote "
            f"{task} VERSION --cluster {name} --reason WHY"
        )
    before = registry.present(task)
    try:
        print(f"{name} {task}: champion is now {registry.rollback(task, reason)}, no longer {before}")
    except NoEarlierChampionError:
        registry.withdraw(task, reason)
        print(f"{name} {task}: no sound champion before; baseline is in charge again, no longer {before}")
    print(
        "  taken over at the next publication; the next nightly training may promote a newer version, "
        "`weatherglass models list` says why"
    )


def _registry(settings: Settings, cluster: str) -> Registry:
    return Registry(settings.registry / cluster)


def _deed(deed: Mapping[str, Any]) -> str:
    """One entry of the history in words."""
    done = {"promote": "promoted", "rollback": "rolled back", "withdraw": "model withdrawn"}
    what = done.get(str(deed.get("action")), str(deed.get("action")))
    before = f" (before it {deed['previous']})" if deed.get("previous") else ""
    return f"{what} {_time(deed.get('at'))} by {deed.get('actor')}{before}: {deed.get('reason')}"


def _time(text: Any) -> str:
    try:
        return f"{datetime.fromisoformat(str(text)):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return str(text)

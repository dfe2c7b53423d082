"""From a parsed file and the environment to one configuration, and what is said of a setting that is wrong.

Which settings there are stands in `pipelines/settings.py`, whose root class is handed in; nothing here knows a name of
one, but that `clusters` is a table by name.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

ENV_PREFIX = "WEATHERGLASS_"
ENV_OTHER = {"WEATHERGLASS_CONFIG", "WEATHERGLASS_TRACES", "WEATHERGLASS_TOKEN", "WEATHERGLASS_DAGSTER_HOME"}

Location = tuple[Any, ...]
Problem = tuple[Location, str]
"""Where a setting stands, and its value with what is wrong with it."""


class Section(BaseModel):
    """A section of the settings: nothing unknown in it, and no `true` or `false` where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if _takes(annotation, int, float) and not _takes(annotation, bool) and _has_flag(value):
            raise ValueError("true and false are no numbers")
        return value


def _takes(annotation: Any, *types: type) -> bool:
    """Whether a type is, or is made of, one of some types. Sections in it look after themselves."""
    return annotation in types or any(_takes(part, *types) for part in get_args(annotation))


def _has_flag(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_flag(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(_has_flag(part) for part in value)
    return isinstance(value, bool)


class SettingsError(Exception):
    """A setting is wrong. The message gives its name, its value and the valid choices."""


def _cluster_fields(root: type[BaseModel]) -> dict[str, Any]:
    return get_args(root.model_fields["clusters"].annotation)[-1].model_fields


def _variables(root: type[BaseModel]) -> dict[str, Location]:
    """Every environment variable that is a setting, but those of clusters, whose names are free."""
    found: dict[str, Location] = {}
    for name, info in root.model_fields.items():
        fields = getattr(info.annotation, "model_fields", {}) if info.default_factory is not None else {}
        for location in [(name, field) for field in fields] or [(name,)]:
            found[ENV_PREFIX + "__".join(location).upper()] = location
    return found


def _refuse_variable(root: type[BaseModel], key: str, text: str) -> SettingsError:
    """The error for a variable that is no setting: its name, and the one that was meant."""
    known = [*_variables(root), *sorted(ENV_OTHER)]
    names = "|".join(_cluster_fields(root))
    cluster = re.fullmatch(f"{ENV_PREFIX}CLUSTERS_+(.+?)_+({names})", key, re.IGNORECASE)
    if cluster:
        meant = f"{ENV_PREFIX}CLUSTERS__{cluster[1]}__{cluster[2]}".upper()
        if meant != key:
            return SettingsError(f"{key} = {shown(text)}: no such setting; did you mean {meant}?")
    flat = {re.sub("_+", "_", name.removeprefix(ENV_PREFIX)): name for name in known}
    near = difflib.get_close_matches(re.sub("_+", "_", key.removeprefix(ENV_PREFIX).upper()), list(flat), n=1)
    hint = f"did you mean {flat[near[0]]}?" if near else "`weatherglass config example` lists all settings."
    dotted = key.removeprefix(ENV_PREFIX).lower().replace("__", ".")
    return SettingsError(
        f"{key} = {shown(text)}: no such setting ({dotted}); {hint} Every variable that begins with {ENV_PREFIX} must "
        f"be one: {ENV_PREFIX}SECTION__NAME, two underscores after the section"
    )


def overlay(root: type[BaseModel], data: dict[str, Any], environ: Mapping[str, str]) -> dict[Location, str]:
    """Put the environment's settings into `data`.

    Returns:
        Which variable each of them came from.

    Raises:
        SettingsError: A variable that begins like one is no setting.
    """
    known = set(_variables(root).values()) | {(name,) for name in root.model_fields}
    cluster_fields = _cluster_fields(root)
    origins: dict[Location, str] = {}
    for key, text in sorted(environ.items()):
        if not key.startswith(ENV_PREFIX) or key in ENV_OTHER:
            continue
        path = tuple(part.lower() for part in key.removeprefix(ENV_PREFIX).split("__"))
        is_cluster = len(path) == 3 and path[0] == "clusters" and path[2] in cluster_fields
        if path not in known and not is_cluster:
            raise _refuse_variable(root, key, text)
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        here = data
        for part in path[:-1]:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise SettingsError(f"{key}: {part} is not a section")
        here[path[-1]] = value
        origins[path] = key
    return origins


def shown(value: Any) -> str:
    """A value as messages may show it: without the password of a URL or connection string, or a token."""
    text = re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", repr(value))
    text = re.sub(r"\bwg_[0-9a-f]+_[\w-]+", "wg_***", text)
    return re.sub(r"(password\s*=\s*)[^\s\"']+", r"\1***", text, flags=re.IGNORECASE)


def _choices(root: type[BaseModel], location: Location) -> str:
    """Valid names beside a wrong one, nearest first."""
    section: Any = root
    for part in location[:-1]:
        fields = getattr(section, "model_fields", {})
        annotation = fields[part].annotation if part in fields else None
        if get_origin(annotation) is dict:  # the name that follows is free, and leads to the same class
            annotation = get_args(annotation)[-1]
        section = annotation or section
    names = list(getattr(section, "model_fields", {}))
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"valid names: {', '.join(names)}{hint}"


def _table(root: type[BaseModel], location: Location) -> str:
    """How to write what must be a table."""
    if location[0] == "clusters" and len(location) <= 2:
        is_setting = len(location) == 2 and location[1] in _cluster_fields(root)
        why = "is a setting of one cluster, and they have names" if is_setting else "the clusters have names"
        return f"{why}: write [clusters.NAME], and the cluster's settings below it"
    if len(location) == 1:
        return f"is a section: write [{location[0]}], and its settings below it"
    return f"must be a table: write {location[-1]} = {{ … }}"


def toml_fault(error: Exception) -> str:
    """What is wrong with a text that is no TOML, in words of TOML."""

    def dotted(found: re.Match[str]) -> str:
        return ".".join(re.findall(r"'([^']*)'", found[0]))

    text = re.sub(r"\((?:'[^']*'(?:, )?)+,?\)", dotted, str(error))
    if text.startswith(("Cannot declare", "Cannot mutate immutable")):
        text += ": it, or the table it stands in, is written further up, as { … } perhaps; use one form for all of it"
    return text


def explain(root: type[BaseModel], error: ValidationError) -> Iterator[Problem]:
    """Location of each wrong setting, and what is wrong with it."""
    for item in error.errors():
        location = tuple(item["loc"])
        if item["type"] == "extra_forbidden":
            yield location, f"{shown(item['input'])}: no such setting; {_choices(root, location)}"
        elif item["type"] in ("model_type", "dict_type"):
            yield location, f"{shown(item['input'])}: {_table(root, location)}"
        else:
            text = item["msg"].removeprefix("Value error, ")
            value = "***" if "prometheus_headers" in location else shown(item["input"])
            yield location, f"{value}: {text}" if location else text


def message(problems: Iterable[Problem], origin: str, variables: Mapping[Location, str]) -> str:
    """One line for each problem, beginning with the file or the environment variable that it came from."""
    lines = []
    for location, text in problems:
        name = ".".join(str(part) for part in location)
        source = next((key for path, key in variables.items() if location[: len(path)] == path), origin)
        lines.append(f"{source}: {name} = {text}" if name else f"{source}: {text}")
    return "\n".join(lines)

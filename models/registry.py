"""The registry of trained models: one folder per version, one champion per task, and the way back.

Here belong saving, checking, loading, promoting and rolling back; not what is in the files, and no decision whether a
model deserves promotion (`models/promotion.py`). This is the only place where `models` touches the disk.

Layout: `<root>/<task>/<version>/{card.json, …}`, `<root>/<task>/champion.json` (the pointer) and
`<root>/<task>/history.jsonl` (who, when, why: one line per promotion or rollback). A version's name ends in a digest
of its card, which holds the hash of every file, so that any altered byte is noticed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

CARD = "card.json"
POINTER = "champion.json"
HISTORY = "history.jsonl"
TABLE_SUFFIX = ".parquet"
SUFFIXES = (".txt", ".json", ".npz", TABLE_SUFFIX)  # formats that cannot carry code
LIBRARIES = ("numpy", "polars", "scikit-learn", "lightgbm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LOCK_TIMEOUT_S = 30.0
ANY = "*"  # of an expected champion: whichever; no name of a version


class RegistryError(Exception):
    """A model is missing, damaged or not allowed; the message names the file or version and what there is instead."""


class NoEarlierChampionError(RegistryError):
    """There is no sound champion to go back to."""


class ChampionChangedError(RegistryError):
    """Somebody else changed the champion after it was looked at; nothing was changed here."""


class RegistryUnreadableError(RegistryError):
    """The files cannot be got at (rights, a file where a folder should be). Nothing is known to be damaged."""


def _unreadable(path: Path, error: OSError) -> RegistryUnreadableError:
    return RegistryUnreadableError(
        f"{path}: cannot be read: {error.strerror or error}; run as the user that owns the state folder, or mend its "
        "rights; no model is known to be damaged"
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked version.

    Attributes:
        version: Name of the version.
        files: File name to bytes. Training tables (`.parquet`) only when asked for.
        card: What is known about the version: task, features, snapshot, span, metrics, hashes, …
        fallback_reason: Why this is not the champion that was asked for; empty when it is.
        model: What `read` made of the files; None where nobody asked.
    """

    version: str
    files: Mapping[str, bytes]
    card: dict[str, Any]
    fallback_reason: str = ""
    model: Any = None


def code_revision(repository: Path | None = None) -> str | None:
    """Git revision of the running code, None when it does not run from a checkout."""
    git = (repository or Path(__file__).resolve().parent.parent) / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head or None
        name = head.removeprefix("ref: ")
        if (git / name).is_file():
            return (git / name).read_text(encoding="utf-8").strip() or None
        for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines():
            if line.endswith(f" {name}"):
                return line.split(" ", 1)[0]
    except OSError:
        pass
    return None


def library_versions() -> dict[str, str]:
    """Versions of the libraries a model depends on."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def _encode(card: Mapping[str, Any]) -> bytes:
    return json.dumps(card, indent=1, sort_keys=True, default=str, allow_nan=False).encode()


def _digest(card_bytes: bytes) -> str:
    return hashlib.sha256(card_bytes).hexdigest()[:12]


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring a folder's names to the disk: new files and renamed ones are found after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Registry:
    """Versions of models of one cluster.

    Args:
        root: Folder of the cluster's registry; made when first written.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    # --- writing --------------------------------------------------------------------------------------------

    def save(self, task: str, files: Mapping[str, bytes], card: Mapping[str, Any]) -> str:
        """Keep a version. It appears whole or not at all; saving the same content again changes nothing.

        Args:
            task: Forecasting task.
            files: File name to content; `.txt`, `.json`, `.npz` and `.parquet` only.
            card: What is known about the model. `trained_at` (ISO 8601 or datetime) dates the version, now if absent.
                Hashes, sizes, library versions and code revision are added here.

        Returns:
            Name of the version, `YYYYMMDDTHHMMSSZ-<digest>`; names sort by time.

        Raises:
            RegistryError: A name or format is not allowed, or the card holds a value that JSON has not (NaN).
            OSError: The disk refused; nothing of the version is left.
        """
        folder = self._task(task)
        for name in files:
            if name == CARD or not _NAME.fullmatch(name) or Path(name).suffix not in SUFFIXES:
                raise RegistryError(
                    f"{name!r} cannot be kept in the registry; allowed: {', '.join(SUFFIXES)}, not {CARD}"
                )
        trained_at = card.get("trained_at") or datetime.now(UTC)
        if isinstance(trained_at, str):
            trained_at = datetime.fromisoformat(trained_at)
        trained_at = trained_at.astimezone(UTC)
        full = {
            "libraries": library_versions(),
            "code_revision": code_revision(),
            **card,
            "task": task,
            "trained_at": trained_at.isoformat(),
            "files": {
                name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in files.items()
            },
        }
        try:
            card_bytes = _encode(full)
        except ValueError as error:
            raise RegistryError(f"card of {task}: not JSON: {error}") from None
        version = f"{trained_at:%Y%m%dT%H%M%SZ}-{_digest(card_bytes)}"
        target = folder / version
        if target.exists():
            return version
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{version}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            for name, data in files.items():
                _write(temporary / name, data)
            _write(temporary / CARD, card_bytes)
            sync_folder(temporary)
            temporary.replace(target)
            sync_folder(folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if target.exists():  # another process saved the same content first
                return version
            raise
        return version

    def promote(
        self, task: str, version: str, reason: str, *, actor: str = "training", at: datetime | None = None,
        expected: str | None = ANY,
    ) -> None:  # fmt: skip
        """Make a version the champion, after checking every byte of it.

        Args:
            task: Forecasting task.
            version: Name of the version.
            reason: Why, for the history.
            actor: Who.
            at: When, now by default.
            expected: Champion against which this was decided, None for a baseline: another one now is not replaced.
                Left out, whatever is in charge is replaced.

        Raises:
            ChampionChangedError: The champion is not the expected one; it stays.
            RegistryError: The version is missing or damaged; the champion stays.
        """
        self.load(task, version)
        with self._lock(task):
            self._expect(task, expected)
            self._point(task, version, "promote", reason, actor, at)

    def rollback(self, task: str, reason: str, *, actor: str = "operator", at: datetime | None = None) -> str:
        """Make the champion before the present one the champion again; damaged ones are passed over.

        Returns:
            Name of the version that is champion now.

        Raises:
            NoEarlierChampionError: There is no earlier sound champion.
            RegistryUnreadableError: The files cannot be read, so nothing can be said of them.
        """
        with self._lock(task):
            present = self.present(task)
            for version in self._earlier(task, present):
                if self._is_sound(task, version):
                    self._point(task, version, "rollback", reason, actor, at)
                    return version
        raise NoEarlierChampionError(f"{task}: no sound champion before {present or 'the first'}; {self._offer(task)}")

    def withdraw(
        self, task: str, reason: str, *, actor: str = "operator", at: datetime | None = None,
        expected: str | None = ANY,
    ) -> None:  # fmt: skip
        """Leave the task without a champion: its baseline forecasts. A later rollback brings the model back.

        Raises:
            ChampionChangedError: The champion is not the `expected` one; it stays (as of `promote`).
        """
        with self._lock(task):
            self._expect(task, expected)
            self._point(task, None, "withdraw", reason, actor, at)

    def prune(self, task: str, keep: int) -> list[str]:
        """Delete all but the newest `keep` versions; the champion and the one before it always stay.

        Returns:
            Names of the deleted versions.
        """
        with self._lock(task):
            present = self.present(task)
            held = {present, *self._earlier(task, present)[:1]}
            old = [name for name in sorted(self._names(task), reverse=True)[keep:] if name not in held]
            for name in old:
                shutil.rmtree(self._task(task) / name, ignore_errors=True)
        return old

    # --- reading --------------------------------------------------------------------------------------------

    def champion(self, task: str) -> str | None:
        """Name of the version in charge, None when a baseline is.

        Raises:
            RegistryError: The pointer is damaged.
            RegistryUnreadableError: The pointer cannot be read.
        """
        pointer = self._pointer(task)
        return pointer["version"] if pointer else None

    def present(self, task: str) -> str | None:
        """The champion; where its pointer is damaged, the last one of the history.

        Raises:
            RegistryUnreadableError: The files cannot be read.
        """
        try:
            return self.champion(task)
        except RegistryUnreadableError:
            raise
        except RegistryError:
            written = self._written(task)
            return written[-1].get("version") if written else None

    def _pointer(self, task: str) -> dict[str, Any] | None:
        path = self._task(task) / POINTER
        try:
            pointer = json.loads(path.read_bytes())
            version = pointer["version"]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(path, error) from None
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryError(f"{path}: unreadable pointer ({error}); `rollback` writes it anew") from None
        if version is not None and not (isinstance(version, str) and _NAME.fullmatch(version)):
            raise RegistryError(f"{path}: {version!r} is no name of a version; `rollback` writes it anew")
        return pointer

    def load(
        self, task: str, version: str | None = None, *, fallback: bool = False, with_tables: bool = False,
        read: Callable[[Mapping[str, bytes]], Any] | None = None,
    ) -> Loaded:  # fmt: skip
        """Read a version and check its hashes.

        Args:
            task: Forecasting task.
            version: Name of the version; None for the champion.
            fallback: When the champion is damaged, give the newest sound champion before it and say why.
            with_tables: Also read and check the training table (of others only the size is checked).
            read: Makes a model of the files; files that it cannot read (of another release) count as damaged.

        Raises:
            RegistryError: Missing, truncated, altered or not to be read; the message names the file or the version.
                With `fallback`, only when no earlier champion is sound either.
        """
        try:
            name = version or self.champion(task)
            if name is None:
                raise RegistryError(f"{task}: no champion; {self._offer(task)}")
            return self._read(task, name, with_tables, read)
        except RegistryError as error:
            if not fallback or version is not None:
                raise
            for earlier in self._earlier(task, self.present(task), include_present=True):
                try:
                    found = self._read(task, earlier, with_tables, read)
                except RegistryError:
                    continue
                return Loaded(found.version, found.files, found.card, str(error), found.model)
            raise

    def versions(self, task: str) -> list[dict[str, Any]]:
        """Cards of all versions, newest first, each with `version`, `is_champion` and, when unreadable, `error`."""
        try:
            present = self.champion(task)
        except RegistryError:
            present = None
        cards = []
        for name in sorted(self._names(task), reverse=True):
            try:
                card, error = self._card(task, name), None
            except RegistryError as problem:
                card, error = {"task": task}, str(problem)
            cards.append(
                {**card, "version": name, "is_champion": name == present} | ({"error": error} if error else {})
            )
        return cards

    def history(self, task: str) -> list[dict[str, Any]]:
        """Promotions and rollbacks, oldest first: `at`, `action`, `version`, `previous`, `reason`, `actor`."""
        written = self._written(task)
        return written + self._unwritten(task, written)

    # --- inside ---------------------------------------------------------------------------------------------

    def _task(self, task: str) -> Path:
        if not _NAME.fullmatch(task):
            raise RegistryError(f"{task!r} is no name of a task: letters, digits, '_', '-' and '.' only")
        return self.root / task

    @contextmanager
    def _lock(self, task: str) -> Generator[None]:
        from filelock import FileLock, Timeout

        folder = self._task(task)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_S)
        try:
            with lock:
                yield
        except Timeout:
            raise RegistryError(f"{folder}: held by another process for over {_LOCK_TIMEOUT_S:.0f} s") from None

    def _names(self, task: str) -> list[str]:
        folder = self._task(task)
        try:
            return [path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(folder, error) from None

    def _offer(self, task: str) -> str:
        names = sorted(self._names(task), reverse=True)
        return f"versions: {', '.join(names[:5])}" if names else "no version has been saved"

    def _earlier(self, task: str, present: str | None, *, include_present: bool = False) -> list[str]:
        """Champions that came before, newest first, each once: a rolled-back version is not offered again."""
        stack: list[str] = []
        for item in self.history(task):
            version = item.get("version")
            if not isinstance(version, str):
                continue
            if item.get("action") == "rollback" and version in stack:
                del stack[stack.index(version) + 1 :]
            else:
                stack = [name for name in stack if name != version] + [version]
        if stack and stack[-1] == present and not include_present:
            stack.pop()
        return stack[::-1]

    def _written(self, task: str) -> list[dict[str, Any]]:
        """Entries of the history's file; a line that a crash cut off is passed over."""
        try:
            lines = (self._task(task) / HISTORY).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self._task(task) / HISTORY, error) from None
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return [item for item in found if isinstance(item, dict)]

    def _unwritten(self, task: str, written: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The pointer's own entry where a crash kept it from the history."""
        try:
            pointer = self._pointer(task)
        except RegistryUnreadableError:
            raise
        except RegistryError:
            return []
        return [pointer] if pointer and pointer not in written[-1:] and "action" in pointer else []

    def _expect(self, task: str, expected: str | None) -> None:
        present = self.present(task)
        if expected in (ANY, present):
            return
        last = self.history(task)[-1:]
        deed = f" ({last[0].get('action')} by {last[0].get('actor')} at {last[0].get('at')})" if last else ""
        raise ChampionChangedError(
            f"{task}: {present or 'the baseline'} has taken charge meanwhile{deed}, and {expected or 'the baseline'} "
            "was judged against: nothing was changed"
        )

    def _is_sound(self, task: str, version: str) -> bool:
        try:
            self._read(task, version, with_tables=False)
        except RegistryUnreadableError:
            raise
        except RegistryError:
            return False
        return True

    def _card(self, task: str, version: str) -> dict[str, Any]:
        path = self._task(task) / version / CARD
        if version not in self._names(task):
            raise RegistryError(f"{task}: no version {version!r}; {self._offer(task)}")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise RegistryError(f"{path}: missing") from None
        except OSError as error:
            raise _unreadable(path, error) from None
        if _digest(data) != version.rsplit("-", 1)[-1]:
            raise RegistryError(f"{path}: altered or truncated since it was saved")
        try:
            card = json.loads(data)
        except ValueError:
            raise RegistryError(f"{path}: not JSON") from None
        return card

    def _read(
        self, task: str, version: str, with_tables: bool, read: Callable[[Mapping[str, bytes]], Any] | None = None
    ) -> Loaded:
        card = self._card(task, version)
        files: dict[str, bytes] = {}
        for name, facts in card["files"].items():
            path = self._task(task) / version / name
            try:
                if path.stat().st_size != facts["bytes"]:
                    raise RegistryError(f"{path}: {path.stat().st_size} bytes, {facts['bytes']} were saved")
                if name.endswith(TABLE_SUFFIX) and not with_tables:
                    continue
                data = path.read_bytes()
            except FileNotFoundError:
                raise RegistryError(f"{path}: missing") from None
            except OSError as error:
                raise _unreadable(path, error) from None
            if hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise RegistryError(f"{path}: altered since it was saved (hash differs)")
            files[name] = data
        if read is None:
            return Loaded(version, files, card)
        try:
            return Loaded(version, files, card, model=read(files))
        except Exception as error:  # whatever a parser makes of files that another release wrote
            raise RegistryError(
                f"{task} {version}: its files cannot be read by this release ({type(error).__name__}: {error}); "
                f"`weatherglass models rollback {task}` or `weatherglass retrain --task {task}` helps"
            ) from error

    def _point(self, task: str, version: str | None, action: str, reason: str, actor: str, at: datetime | None) -> None:
        folder = self._task(task)
        moment = (at or datetime.now(UTC)).astimezone(UTC).isoformat()
        entry = {
            "at": moment, "action": action, "version": version, "previous": self.present(task),
            "reason": reason, "actor": actor,
        }  # fmt: skip
        # The pointer is the deed and holds its own entry: a crash before it changes nothing, one after it leaves an
        # entry that `history` knows and the next deed writes down.
        self._append(task, self._unwritten(task, self._written(task)))
        temporary = folder / f".{POINTER}.{os.getpid()}.tmp"
        try:
            _write(temporary, json.dumps(entry, sort_keys=True).encode())
            temporary.replace(folder / POINTER)
            sync_folder(folder)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        try:
            self._append(task, [entry])
        except OSError as error:
            log.warning("%s: the entry of %s was not written (%s); the next change adds it", task, version, error)

    def _append(self, task: str, entries: Sequence[dict[str, Any]]) -> None:
        if not entries:
            return
        path = self._task(task) / HISTORY
        with path.open("ab") as file:
            if file.tell() and not self._ends_in_newline(path):
                file.write(b"\n")
            file.write(b"".join(json.dumps(entry, sort_keys=True).encode() + b"\n" for entry in entries))
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _ends_in_newline(path: Path) -> bool:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

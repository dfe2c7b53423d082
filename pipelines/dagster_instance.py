"""Makes Dagster's databases before any of its processes starts: `python -m pipelines.dagster_instance`.

Daemon and web server each make them when they are missing, and without a lock: started at once on an empty folder, both
stamp the schema, and from then on no code location loads ("more than one head present"). So they are made here first,
under a lock, and a folder that was spoiled that way is mended.
"""

import sqlite3
from pathlib import Path

import filelock

from pipelines.dagster_home import dagster_environment
from pipelines.settings import Settings, load_settings


def prepare(settings: Settings, environ: dict[str, str]) -> Path:
    """Make the databases of Dagster's instance, or mend them; done already, nothing changes.

    Args:
        settings: State folder.
        environ: The environment to start Dagster's processes in; what they need is added to it.

    Returns:
        The folder that Dagster writes to.
    """
    environ.update(dagster_environment(settings))
    folder = Path(environ["WEATHERGLASS_DAGSTER_HOME"])
    with filelock.FileLock(folder / ".prepare.lock", timeout=120):
        for database in folder.rglob("*.db"):
            _mend(database)
        import dagster as dg

        dg.DagsterInstance.get().dispose()
    return folder


def _mend(database: Path) -> None:
    """Drop the stamp that the slower of two starting processes left beside the right one."""
    from dagster._core.storage.sqlite import LAST_KNOWN_STAMPED_SQLITE_ALEMBIC_REVISION as STALE

    connection = sqlite3.connect(database, timeout=30)
    try:
        with connection:
            heads = {row[0] for row in connection.execute("SELECT version_num FROM alembic_version")}
            if len(heads) > 1:
                connection.execute("DELETE FROM alembic_version WHERE version_num = ?", [STALE])
    except sqlite3.OperationalError:
        return  # no such table: nothing was stamped
    finally:
        connection.close()


if __name__ == "__main__":
    import os

    prepare(load_settings(), os.environ)  # ty: ignore[invalid-argument-type]

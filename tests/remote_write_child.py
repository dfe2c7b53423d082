"""A receiver of remote-write in a process of its own, for tests that kill it: `python -m tests.remote_write_child`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pipelines.sources.remote_write import RemoteWriteSource


def main(folder: str, port: str) -> None:
    source = RemoteWriteSource("a", Path(folder), port=int(port), exporter_interval_s=1, tick_s=1)
    print("listening on", source.listen(), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What ranks tell each other beside the group that is tested: files in a folder that they share, whatever they are."""

import time
from pathlib import Path

_LIMIT = 60.0  # seconds


def tell(folder: str, event: str, rank: int):
    """Say that something has happened on a rank."""
    Path(folder, f"{event}-{rank}").touch()


def wait_for(folder: str, event: str, ranks: int):
    """Wait until something has happened on so many ranks."""
    begin = time.monotonic()
    while len(list(Path(folder).glob(f"{event}-*"))) < ranks:
        if time.monotonic() - begin > _LIMIT:
            msg = f"{ranks} ranks should have said {event!r} within {_LIMIT:g} s, got {sorted(Path(folder).iterdir())}"
            raise AssertionError(msg)
        time.sleep(0.01)

"""Site settings that a peer's folder remembers, so that what is resumed or evaluated later finds the same data."""

from __future__ import annotations

import json
from pathlib import Path

from diloco.base.errors import StateError
from diloco.config.site import Site

NAME = "site.json"


def remember(directory: Path, site: Site) -> None:
    """Write `site.json` into the folder of a peer. Raises OSError."""
    path = directory / NAME
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"data": {"root": str(Path(site.data.root).absolute())}}) + "\n")
    beside.replace(path)


def remembered_root(path: Path) -> str | None:
    """The data root of the peer whose folder, folder of checkpoints, or checkpoint `path` is; None: not known.

    Raises StateError for a damaged file.
    """
    folder = path.absolute()
    places = (folder, folder.parent, folder.parent.parent)
    found = next((place / NAME for place in places if (place / NAME).is_file()), None)
    if found is None:
        return None
    try:
        root = json.loads(found.read_text())["data"]["root"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateError(
            f"{found} is damaged", "delete it, and name the data's folder: data.root, --data-root"
        ) from error
    return str(root)

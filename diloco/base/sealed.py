"""Lines of JSON, and bytes, with a checksum: what was torn or changed on a disk is told from what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest


def canonical(tree: Any) -> bytes:
    """JSON with sorted keys and no blanks, in UTF-8."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def sealed_line(tree: Mapping[str, Any]) -> bytes:
    """Canonical JSON on a line that begins with its checksum."""
    data = canonical(tree)
    return xxh3_64_hexdigest(data).encode() + b" " + data + b"\n"


def unsealed(line: bytes) -> dict[str, Any] | None:
    """JSON object in a line by `sealed_line` (without the line's end); None for other bytes."""
    checksum, _, data = line.partition(b" ")
    if checksum != xxh3_64_hexdigest(data).encode():
        return None
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict) else None


def checksum_of(data: bytes) -> int:
    """Checksum of bytes, 64 bits: against accidents, not against malice."""
    return xxh3_64_intdigest(data)

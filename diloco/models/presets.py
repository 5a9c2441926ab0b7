"""Model sizes by name: small ones for a laptop and the sizes published with DiLoCo.

The parameter counts in the comments include a 256-token tied embedding for the byte-level presets and a
32,768-token untied head for the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "nano": {"layers": 2, "dim": 96, "heads": 4},
}

"""A member that lies about its values: `python -m scripts.attacks.lies_of_values LIE peer ...`."""

from __future__ import annotations

import sys
from dataclasses import replace

from diloco.__main__ import main as diloco
from diloco.base.decisions import Measure
from diloco.outer.line import Line, PendingContribution
from diloco.peer import rank
from diloco.round import Seconds, measure
from scripts.attacks.liar import LIES, lie

FLIP = -10.0
"""Its contributions are that many times what it trained: not too large for `membership.max_norm_ratio`."""


@lie
def flipped() -> None:
    """The progress of all others is undone twice over."""

    def changed(line: Line, how: Measure, seconds: Seconds) -> PendingContribution:
        sent = measure(line, how, seconds)
        fragment = line.layout.fragments[sent.contribution.fragment]
        parts = []
        for part, payload in enumerate(sent.contribution.parts):
            codec = line.codecs[fragment.group_of(part)]
            parts.append(codec.encode(codec.decode(payload, fragment.size_of(part)) * FLIP))
        line.sent = replace(sent, contribution=replace(sent.contribution, parts=parts))
        return line.sent

    setattr(rank, "measure", changed)  # noqa: B010


if __name__ == "__main__":
    LIES[sys.argv.pop(1)]()
    diloco()

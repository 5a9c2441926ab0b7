"""Training data: sources of token blocks, and the order in which a peer reads those that are leased to it.

    dataset.py                the seam: blocks of tokens by index, a fixed held-out part, a fingerprint
    text.py shards.py hf.py   the sources, with the tokenizers and the packing of shards
    hf_tokenizer.py           Hugging Face's tokenizers
    files.py                  from paths of a contract to files
    reader.py                 from a position, counted over all epochs, to a block; one peer's place in its lease

The leases themselves, which block positions belong to which peer, are `diloco.protocol.leases`. This module imports
neither torch nor numpy, so that `reader` stays cheap to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.config.contract import DataSection
    from diloco.data.dataset import Dataset


def open_dataset(section: DataSection, root: Path) -> Dataset:
    """The dataset of the contract's data source; relative paths are taken inside `root`, the site's data folder.

    Raises DataError (missing, empty or malformed data) and ConfigError (a path outside `root`, a key that the
    source does not take, or a missing extra).
    """
    match section.source:
        case "stdlib":
            from diloco.data.text import open_stdlib

            return open_stdlib(section)
        case "text":
            from diloco.data.text import open_text

            return open_text(section, root)
        case "shards":
            from diloco.data.shards import open_shards

            return open_shards(section, root)
        case "hf":
            from diloco.data.hf import open_stream

            return open_stream(section, root)

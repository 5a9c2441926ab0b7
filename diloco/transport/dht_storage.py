"""Storage of a node of hivemind's DHT for the records of one run. It is bounded: anybody may store there."""

from __future__ import annotations

from typing import Any

from hivemind.dht import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

MAX_RECORDS = 2048
"""Names that a node stores records of, twice as many as a roster has. Known ones go on when others find no room."""


class Records(DictionaryDHTValue):  # type: ignore[misc]
    """The run's records by name, in hivemind's terms: subkey, value and expiration. A look-up adds to it, too."""

    expiration_heap: list[Any]

    def store(self, key: str, value: bytes, expiration_time: float) -> bool:
        """Store a record that lasts longer than the one of that name. False: it does not, or there is no room."""
        known = self.data.get(key)
        if known is not None and known.expiration_time >= expiration_time:
            return False  # hivemind would note the earlier expiration, and take the record out then
        if known is None and len(self) >= MAX_RECORDS:
            return False
        if len(self.expiration_heap) > 2 * MAX_RECORDS:  # hivemind leaves there what was replaced, until it expires
            self.expiration_heap = sorted(self.key_to_heap.values())
        return bool(super().store(key, value, expiration_time))


MSGPackSerializer._ext_types[Records] = MSGPackSerializer._ext_types[DictionaryDHTValue]  # read as that


class RecordStorage:
    """hivemind's storage and its cache in one: into a cache of its own strangers could put what hides the records."""

    def __init__(self, key: bytes) -> None:
        """`key`: of the run, the only one for which records pass the validator."""
        self._key = DHTID.from_bytes(key)
        self._records = Records()

    def get(self, key: Any) -> Any:
        """The records with the time at which the last one expires; None: there are none."""
        there = key == self._key and len(self._records)
        return ValueWithExpiration(self._records, self._records.latest_expiration_time) if there else None

    def items(self) -> list[tuple[Any, Any]]:
        """Key and records, for a node that is new."""
        found = self.get(self._key)
        return [(self._key, found)] if found is not None else []

    def store_subkey(self, key: Any, subkey: str, value: bytes, expiration_time: float) -> bool:
        """Store another node's record."""
        return key == self._key and self._records.store(subkey, value, expiration_time)

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: str) -> bool:
        """Store this node's own record."""
        return self.store_subkey(key, subkey, value, expiration_time)

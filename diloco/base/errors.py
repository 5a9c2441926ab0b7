"""Errors for people: what was wrong, where, and what to do; each class has the exit code a supervisor reads.

Only configuration, usage and the machine raise. The weather (a peer lost, late, corrupt) is a value with a
reason, see `diloco.base.types.Skip`, and never an exception through a training loop.

    DilocoError (1)
      UsageError (2)         ConfigError (10)      UnreachableError (11)   TicketError (12)
      StateError (13)        ResourceError (14)    EvictedError (15)       IncompatibleError (16)
      DataError (18)         Interrupted (130)

Codes 11, 14 and 18 are worth a retry (elsewhere or later); the others are not.
"""

from __future__ import annotations


class DilocoError(Exception):
    """An error for people: its cause in one line and the way to mend it in another. Each subclass has an exit code."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.cause}\n  fix: {self.fix}" if self.fix else self.cause


class UsageError(DilocoError, exit_code=2):
    """The command line or a library call makes no sense."""


class ConfigError(DilocoError, exit_code=10):
    """A contract or site file is wrong."""


class UnreachableError(DilocoError, exit_code=11):
    """Nobody answers at the address to join."""


class TicketError(DilocoError, exit_code=12):
    """The run does not admit this peer: its secret is another, or the address names another contract."""


class StateError(DilocoError, exit_code=13):
    """A checkpoint or a downloaded state is damaged or missing."""


class ResourceError(DilocoError, exit_code=14):
    """The machine lacks something: disk, memory, a port, a device."""


class EvictedError(DilocoError, exit_code=15):
    """The run goes on without this peer and does not take it back."""


class IncompatibleError(DilocoError, exit_code=16):
    """The other side speaks another protocol, contract, model or data set."""


class DataError(DilocoError, exit_code=18):
    """The training data is missing, empty or malformed."""


class Interrupted(DilocoError, exit_code=130):
    """A signal stopped the program before there was anything to leave."""

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
    """A cause in one line and the way to mend it in another."""

    exit_code = 1

    def __init__(self, cause: str, fix: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.cause}\n  fix: {self.fix}" if self.fix else self.cause


class UsageError(DilocoError):
    """The command line or a library call makes no sense."""

    exit_code = 2


class ConfigError(DilocoError):
    """A contract or site file is wrong."""

    exit_code = 10


class UnreachableError(DilocoError):
    """Nobody answers at the address to join."""

    exit_code = 11


class TicketError(DilocoError):
    """The run does not admit this peer: its secret is another, or the address names another contract."""

    exit_code = 12


class StateError(DilocoError):
    """A checkpoint or a downloaded state is damaged or missing."""

    exit_code = 13


class ResourceError(DilocoError):
    """The machine lacks something: disk, memory, a port, a device."""

    exit_code = 14


class EvictedError(DilocoError):
    """The run goes on without this peer and does not take it back."""

    exit_code = 15


class IncompatibleError(DilocoError):
    """The other side speaks another protocol, contract, model or data set."""

    exit_code = 16


class DataError(DilocoError):
    """The training data is missing, empty or malformed."""

    exit_code = 18


class Interrupted(DilocoError):
    """A signal stopped the program before there was anything to leave."""

    exit_code = 130

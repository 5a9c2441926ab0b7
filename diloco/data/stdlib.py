"""The embedded default: source text of the Python standard library on this machine, as bytes.

It needs no download, and two machines with the same Python hold the same text. Left out are the parts that
distributions leave out or that differ from build to build, tests, and tables of numbers.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

from diloco.base.errors import ConfigError, DataError
from diloco.config.contract import DataSection
from diloco.data.dataset import Dataset
from diloco.data.files import read_bytes, walk
from diloco.data.split import split_dataset
from diloco.data.tokenizer import ByteTokenizer

_SKIP_FOLDERS = frozenset(
    # not the standard library, or compiled
    {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
    # packaged separately by distributions
    | {"test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip"}
    # 1.4 MB of character tables
    | {"encodings"}
)
_SKIP_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Beginnings of file names that hold this machine's own settings."""


def open_stdlib(section: DataSection) -> Dataset:
    """Documents are files, each followed by the byte 0. Raises DataError when the library's source is not installed."""
    if section.tokenizer != "bytes" or section.paths:
        raise ConfigError("data.source 'stdlib' takes bytes only and no paths", "for anything else use 'text'")
    return read_library(Path(sysconfig.get_path("stdlib")), section)


def read_library(folder: Path, section: DataSection) -> Dataset:
    """The dataset of a standard library in `folder`. Raises DataError."""
    files = [file for file in walk(folder, (".py",), _SKIP_FOLDERS) if not file.name.startswith(_SKIP_FILES)]
    documents = {
        file.relative_to(folder).as_posix(): [np.frombuffer(read_bytes(file) + b"\0", np.uint8)] for file in files
    }
    if not documents:
        raise DataError(f"{folder} holds no source of the standard library (*.py)", "use data.source = 'text'")
    return split_dataset(documents, section, ByteTokenizer.vocab_size, (), str(folder))

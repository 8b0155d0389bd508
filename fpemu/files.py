"""Files written whole or not at all; mappings in those that people read and write: TOML, YAML and JSON."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import yaml

SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def replace_whole(target: Path, write: Callable[[Path], Any]) -> None:
    """Write a file whole or not at all: whoever reads, or is killed, sees the old content or the new."""
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        write(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_mapping(path: Path, mapping: dict[str, Any]) -> None:
    """Write a mapping to a file at once: whoever reads sees the old content or the new.

    Raises:
        ValueError: the name's end is none of SUFFIXES.
    """
    if _suffix(path) == ".toml":
        text = tomli_w.dumps(mapping)
    elif _suffix(path) == ".json":
        text = json.dumps(mapping, indent=2) + "\n"
    else:
        text = yaml.safe_dump(mapping, sort_keys=False)
    replace_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: the name's end is none of SUFFIXES, or the file holds no mapping.
    """
    suffix, text = _suffix(path), path.read_text(encoding="utf-8")
    try:
        read = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not valid {suffix[1:]}: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{path} must hold a mapping, got {type(read).__name__}")
    return read


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"a file ends in {', '.join(SUFFIXES)}, got {str(path)!r}")
    return suffix

"""Files that commands read and write."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp4comm.launch import UserError


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Write a file that an option names.

    Raises:
        UserError: it cannot be written, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be written: {error.strerror}") from error


def write_json(path: Path, content: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Write strict JSON, as ``--json`` asks: null where a number is not finite.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(_plain(content), indent=1, allow_nan=False, default=str)
    with writing("json", path):
        path.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Any]:
    """Read results: a file holds one, or a list of one for each case.

    Raises:
        OSError, ValueError, RecursionError: it cannot be read, or is no JSON.
    """
    content = _plain(json.loads(path.read_text(encoding="utf-8")))
    return content if isinstance(content, list) else [content]


def _plain(value: Any) -> Any:
    """Make what any reader takes: no number that is not finite, no half of a surrogate pair."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):  # a file's name may be any bytes
        return value.encode(errors="backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value

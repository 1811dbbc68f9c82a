"""Files of JSON that people edit and other versions write: read with care, written in one step."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import stat
from typing import Any

from .errors import FileError

MOST_BYTES = 64 * 2**20  # of a file: some hundred thousand entries
DEEPEST = 40  # of what is nested in it: what is written here has 6 levels
NAME = re.compile(r"[A-Za-z_][\w.-]{0,99}")


def opened(path: str | os.PathLike[str], what: str, major: int, lists: str) -> dict[str, Any]:
    """The JSON object of a file of our own: of a version, and with a list of that name.

    Raises:
        FileError: it is none, is damaged, or comes from a newer major version.
        OSError: it cannot be opened.
    """
    document = parsed(path, what)
    version = document.get("version")
    said = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    if said is None:
        raise damaged(path, what, f"'version' is {version!r:.50}, wanted '{major}.0'")
    if int(said[1]) > major:
        raise FileError(
            f"{path}: a {what} of version {said[0]}; this fuel_jax reads {major}.x. "
            "Install a newer fuel_jax, or name another file."
        )
    for name, kind in (("machine", dict), (lists, list)):
        if not isinstance(document.get(name), kind):
            raise damaged(path, what, f"{name!r} is missing or not a {kind.__name__}")
    return document


def parsed(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The JSON object of a file."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileError(f"{path}: not a file. Name a {what}.")
    if status.st_size > MOST_BYTES:
        raise FileError(
            f"{path}: {status.st_size} bytes, and a {what} has at most {MOST_BYTES}. "
            "Name another file."
        )
    try:
        document = json.loads(
            pathlib.Path(path).read_bytes(), parse_constant=finite, parse_float=finite
        )
    except RecursionError:
        document = None
    except ValueError as error:  # not JSON, not UTF-8, or a number of absurd length
        raise damaged(path, what, str(error)[:200]) from None
    if document is None or is_deep(document):
        raise damaged(path, what, "it is nested too deeply, or null")
    if not isinstance(document, dict):
        raise damaged(path, what, f"it holds a {type(document).__name__}, wanted an object")
    return document


def is_deep(value: Any, left: int = DEEPEST) -> bool:
    """Whether more levels are nested in it than are left."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not left or any(is_deep(v, left - 1) for v in held)


def damaged(path: Any, what: str, why: str) -> FileError:
    """The error for a file that is not what it should be."""
    return FileError(
        f"{path}: damaged, or no {what}: {why}. It was left as it is; "
        "name another file, or move this one away to measure anew."
    )


def finite(digits: str) -> float:
    """A number of the file."""
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is not a number of JSON's")
    return value


def number(value: Any, zero: bool = False) -> float:
    """A positive number, or at least no negative one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
        raise ValueError
    if not (value or zero):
        raise ValueError
    return float(value)


def named(value: Any) -> str:
    """A name of an op, kernel or parameter."""
    if not NAME.fullmatch(value):
        raise ValueError
    return value


def text(value: Any) -> str:
    """A short text, of one line and printable."""
    if not isinstance(value, str):
        raise ValueError
    return "".join(c if c.isprintable() else " " for c in value[:300])


def save(path: str | os.PathLike[str], content: str) -> None:
    """Write a file in one step: whoever reads it sees the old one or the new one."""
    path = pathlib.Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def dumps(document: dict[str, Any], lists: str) -> str:
    """A document's text, what is in its list a line each."""
    head = {n: v for n, v in document.items() if n != lists}
    dump = lambda value: json.dumps(value, allow_nan=False, ensure_ascii=False)
    lines = [f"{dump(n)}: {dump(v)}" for n, v in head.items()]
    rows = ",\n".join(map(dump, document[lists]))
    return "{" + ",\n ".join([*lines, f'"{lists}": [\n{rows}\n]']) + "}\n"

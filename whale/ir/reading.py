"""Reading what users give: text within bounds, so that a file that is wrong, or made to be, is an error at once and not minutes later."""

from __future__ import annotations

import json
import os
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

MOST_BYTES_OF_YAML, MOST_BYTES_OF_JSON = 2**22, 2**29
MOST_VALUES = 200_000
"""In a YAML file, where those that aliases stand for count each time."""
MOST_DEPTH = 100
"""Lists and mappings inside one another."""

_BETWEEN_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"|[^"\[\]{}]++', re.DOTALL)


def read_text(path: str | Path, most_bytes: int) -> str:
    """A file's text.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or is not text.
    """
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
        num_bytes = max(os.fstat(file.fileno()).st_size, len(data))
    if num_bytes > most_bytes:
        raise ValueError(f"it has at most {most_bytes:,} bytes (this: {num_bytes:,})")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not text in UTF-8 (byte {error.start})") from None


def parse_json(text: str) -> Any:
    """What JSON says.

    Raises:
        ValueError: it nests too deep; a `json.JSONDecodeError` where it is no JSON.
    """
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    depth = max(accumulate(steps.get(each, 0) for each in _BETWEEN_BRACKETS.sub("", text)), default=0)
    if depth > MOST_DEPTH:
        raise ValueError(f"lists and mappings nest at most {MOST_DEPTH} deep (here: {depth})")
    return json.loads(text)


def read_json(path: str | Path) -> Any:
    """What a JSON file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or too large or too deep.
    """
    return parse_json(read_text(path, MOST_BYTES_OF_JSON))

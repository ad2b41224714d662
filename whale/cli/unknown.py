"""Words of a command line that nobody knows: an error with the nearest one that is known."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from whale.config import nearest


def refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Ends the command with the usage of `parser`, if there are `words` that it has left over."""
    if not words:
        return
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is None:
        parser.error(f"nothing is known of {' '.join(words)}")
    known = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    found = nearest(flag, known)
    parser.error(f"there is no {flag}" + (f" (did you mean {found!r}?)" if found else ""))

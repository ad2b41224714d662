"""``whale checkpoint``: what a checkpoint holds, its weights as files that other libraries read, and checkpoints of such files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whale.cli.tables import print_table
from whale.errors import ConfigError
from whale.ir.plan import Plan, describe_degrees, describe_order, describe_shape
from whale.ir.serialization import read_value
from whale.units import counted, format_bytes, parse_quantity

if TYPE_CHECKING:
    from whale.runtime.checkpoint.contents import Contents

SHARD_BYTES = "5 GB"


def add_parser(verbs: argparse._SubParsersAction[Any]) -> None:
    parser = verbs.add_parser(
        "checkpoint",
        help="show what a checkpoint holds; export and import weights",
        description="Shows what a checkpoint of engine.save holds, writes its weights as safetensors files under the model's own names, "
        "or makes a checkpoint of weights alone from such files, for engine.load.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="step, plan, tensors, sizes, the user's data")
    show.add_argument("path", metavar="PATH", help="the checkpoint")
    show.add_argument("--verify", action="store_true", help="read every tensor and compare its checksum")
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(run=_show)
    export = actions.add_parser("export", help="write model.safetensors, or shards with an index")
    export.add_argument("path", metavar="PATH", help="the checkpoint")
    export.add_argument("out", metavar="OUT", help="the folder to make")
    export.add_argument("--shard-bytes", default=SHARD_BYTES, metavar="SIZE", help=f"largest size of a file (default: {SHARD_BYTES})")
    export.set_defaults(run=_export)
    back = actions.add_parser("import", help="make a checkpoint of weights alone")
    back.add_argument("file", metavar="FILE", help="a safetensors file, a model.safetensors.index.json, or the folder of either")
    back.add_argument("path", metavar="PATH", help="the checkpoint to make")
    back.set_defaults(run=_import)


def _show(arguments: argparse.Namespace) -> int:
    from whale.runtime.checkpoint.checkpoint import model_tensors, open_checkpoint
    from whale.runtime.checkpoint.model_files import num_bytes

    path = Path(arguments.path)
    contents = open_checkpoint(path)
    facts = dict(_facts(path, contents))
    tensors = {name: (stored.dtype, stored.shape, num_bytes(stored)) for name, stored in model_tensors(contents).items()}
    facts["model_bytes"] = sum(size for *_, size in tensors.values())
    facts["other_bytes"] = sum(map(num_bytes, contents.tensors.values())) - facts["model_bytes"]
    if arguments.verify:
        pieces = [(stored, piece) for stored in contents.tensors.values() for piece in stored.pieces]
        for stored, piece in pieces:
            contents.read(stored, piece)
        facts["verified_pieces"] = len(pieces)
    if arguments.json:
        listed = {name: dict(zip(("dtype", "shape", "bytes"), each, strict=True)) for name, each in tensors.items()}
        print(json.dumps({**facts, "tensors": listed}, indent=1))
        return 0
    for name, fact in facts.items():
        shown = format_bytes(fact) if name.endswith("_bytes") else ", ".join(fact) if isinstance(fact, list) else fact
        print(f"{name:<15}  {'-' if shown is None else shown}")
    rows = [(name, dtype, " x ".join(map(str, shape)), format_bytes(size)) for name, (dtype, shape, size) in tensors.items()]
    print_table("parameters and buffers", ("name", "type", "shape", "bytes"), rows, ("bytes",))
    return 0


def _facts(path: Path, contents: Contents) -> Iterator[tuple[str, Any]]:
    """What a checkpoint has besides tensors, by name; None for what one of weights alone lacks."""
    from whale.runtime.checkpoint.files import PLAN, score_of, standing
    from whale.runtime.checkpoint.training_state import KIND, STEP, USERS

    found = {key: contents.value(f"extra.{key}") for key in (STEP, f"{KIND}optimizer", f"{KIND}scheduler", USERS)}
    yield from ((key.removeprefix(KIND), value) for key, value in found.items() if key != USERS)
    own, here = found[USERS], standing(path)
    yield "extra", list(map(str, own)) if isinstance(own, Mapping) else None if own is None else type(own).__name__
    yield "score", score_of(here)
    yield "plan", _shape(here / PLAN)


def _shape(file: Path) -> str | None:
    if not file.exists():
        return None
    try:
        replicas = read_value(Plan, file).replicas
    except ValueError:
        return "of another version of whale"
    return f"{describe_shape(replicas)}; {describe_degrees(replicas)}; {describe_order(replicas)}"


def _export(arguments: argparse.Namespace) -> int:
    from whale.runtime.checkpoint.model_files import export_weights

    try:
        most = parse_quantity(arguments.shard_bytes, "B")
    except ValueError as error:
        raise ConfigError(f"--shard-bytes is not a size such as {SHARD_BYTES}: {error}") from None
    for file in export_weights(Path(arguments.path), Path(arguments.out), most):
        print(f"written to {Path(arguments.out) / file}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from whale.runtime.checkpoint.model_files import import_weights

    count = import_weights(Path(arguments.file), Path(arguments.path))
    print(f"{counted(count, 'tensor')} written to {arguments.path}: engine.load takes them as weights alone")
    return 0

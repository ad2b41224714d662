"""The inputs of a verb: a user's function or a captured model, a cluster, and a configuration."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from whale.config import Config, did_you_mean, load_config, nearest
from whale.errors import CaptureError, ClusterError, ConfigError, WhaleError, first_few, raise_faults
from whale.hardware import CPU, compute_type, load_cluster, select
from whale.ir.cluster import Cluster
from whale.ir.graph import MOST_ROWS, ModelGraph
from whale.ir.graph_faults import faults_of
from whale.ir.precision import Precision
from whale.ir.profile import read_profile
from whale.ir.serialization import parse_json, read_value

FUNCTION_HELP = "FILE.py:FUNCTION that returns (model, batch, loss)"

SOURCE_HELP = (
    f"{FUNCTION_HELP}, a model.json of `whale capture`, "
    "or a GPT by its sizes, gpt:KEY=VALUE,... (layers, hidden, heads, sequence, vocabulary)"
)


PUBLISHED = "gpt"
"""How a model of a published run begins."""


def add_source_arguments(parser: argparse.ArgumentParser, *, runs: bool = False) -> None:
    """Adds the model and the arguments of its function; with `runs` the user's own code is required."""
    parser.add_argument("source", metavar="FILE.py:FUNCTION", help=FUNCTION_HELP if runs else SOURCE_HELP)
    parser.add_argument("--arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of FUNCTION; repeatable")


def add_graph_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the arguments of its function, and how deep its graph shall be."""
    add_source_arguments(parser)
    parser.add_argument("--blocks", type=int, metavar="N", help="repeat the model's blocks (at least two are captured) until there are N")


def add_planning_arguments(parser: argparse.ArgumentParser, *, plans: bool = True) -> None:
    """Adds everything that a plan is made from; with `plans` also a plan itself, written or saved."""
    add_graph_arguments(parser)
    parser.add_argument("--cluster", metavar="C.yaml", help="cluster file (default: the recipe's, else this machine)")
    parser.add_argument("--devices", metavar="NAMES", help="devices to plan for: V100:2,host1/* (models, hosts, devices; :N takes N)")
    parser.add_argument("--profile", metavar="P.json", help="times measured by `whale profile`, used instead of computed ones")
    parser.add_argument("--ranks", type=int, metavar="N", help="without --cluster: ranks on this machine (default: one per GPU, else one)")
    parser.add_argument("--recipe", metavar="R.yaml", help="configuration")
    if plans:
        parser.add_argument("--plan", metavar="P.yaml", help="a plan in YAML (what it leaves out is searched), or a plan.json")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one configuration value; repeatable")
    parser.add_argument("--rows", type=int, metavar="N", help="rows of the global batch (default: those of the example)")
    if plans:
        parser.add_argument("--batch-rows", metavar="LOW..HIGH", help="choose the rows from a range, by samples per second")


def is_function(source: str) -> bool:
    """Whether a source is the user's own function, not a captured model or one of a published run."""
    return not source.endswith(".json") and source.partition(":")[0] != PUBLISHED


def read_graph(
    source: str, pairs: Sequence[str], blocks: int | None = None, *, settings: tuple[Config, Cluster] | None = None
) -> ModelGraph:
    """The graph of the model on a command line: captured now, or read from a ``model.json`` without torch.

    Args:
        source: as `SOURCE_HELP` says.
        pairs: arguments of the function, each ``KEY=VALUE``.
        blocks: to which number its blocks are repeated; None: unchanged.
        settings: configuration and cluster, for whose types and devices a function's model is captured; None for its own types.
    """
    device, precision = (None, None) if settings is None else types_of(*settings)
    graph = _graph_of(source, pairs, device, precision)
    if blocks is None:
        return graph
    from whale.workloads import repeat_blocks

    return repeat_blocks(graph, blocks)


def types_of(config: Config, cluster: Cluster) -> tuple[str | None, Precision | None]:
    """The device type that a model is captured for, and the types that ops compute in there; None for the model's own."""
    precision = compute_type(config, cluster)
    device = CPU if all(each.model == CPU for each in cluster.devices) else "cuda"
    return (None, None) if precision is None else (device, precision)


def _graph_of(source: str, pairs: Sequence[str], device: str | None, precision: Precision | None) -> ModelGraph:
    if source.endswith(".json"):
        if precision is not None:
            raise ConfigError(
                f"precision.dtype has no effect: {source} is captured already",
                hint="name FILE.py:FUNCTION, which is captured for the setting",
            )
        return _read_captured(Path(source), pairs)
    name, _, sizes = source.partition(":")
    if name == PUBLISHED:
        from whale.workloads import GPT

        return GPT(**keywords_for(GPT, name, sizes, pairs)).graph(device, precision)
    model, batch, loss, batch_dims = build_model(source, pairs)
    from whale.capture import capture

    return capture(model, batch, loss, batch_dims=batch_dims, device=device, precision=precision)[0]


def build_model(source: str, pairs: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    """The (model, batch, loss, batch_dims) that ``FILE.py:FUNCTION`` returns, called with the ``--arg`` pairs; batch_dims may be None."""
    build = load_function(source)
    values = parse_pairs(pairs, "--arg")
    _check_names(source, build, values)
    with users_code(Path(source.rpartition(":")[0])):
        result = build(**values)
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        raise CaptureError(f"{source} returned {_kind(result)}, not (model, batch, loss) or (model, batch, loss, batch_dims)")
    if result[2] is not None and not callable(result[2]):
        raise CaptureError(f"{source} returned {_kind(result[2])} as the loss of (model, batch, loss), not a function or None")
    if len(result) == 4 and not isinstance(result[3], Mapping | None):
        raise CaptureError(f"{source} returned {_kind(result[3])} as batch_dims after the loss, not a mapping of tensors to 0 or None")
    return (*result, None)[:4]


def keywords_for(build: Callable[..., Any], name: str, sizes: str, pairs: Sequence[str]) -> dict[str, Any]:
    """The keyword arguments of a published model: those in its name, and the ``--arg`` pairs."""
    values = parse_pairs([*filter(None, sizes.split(",")), *pairs], name)
    _check_names(name, build, values)
    return values


def _check_names(source: str, build: Callable[..., Any], values: Mapping[str, object]) -> None:
    parameters = inspect.signature(build).parameters
    by_name = {name: each for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    shown = ", ".join(name if each.default is each.empty else f"{name}={each.default!r}" for name, each in by_name.items())
    unknown = [name for name in values if name not in by_name and not takes_all]
    faults: list[WhaleError] = [CaptureError(f"{source} takes no {name!r}", hint=did_you_mean(name, by_name)) for name in unknown]
    missing = [name for name, each in by_name.items() if each.default is each.empty and name not in values]
    if missing and not unknown:
        faults.append(CaptureError(f"{source} needs {', '.join(missing)}", hint=f"--arg {missing[0]}=VALUE; it takes {shown}"))
    raise_faults(faults)


def read_settings(arguments: argparse.Namespace) -> tuple[Config, Cluster]:
    """Configuration and cluster of a verb that plans: read before the model, which takes longer."""
    if arguments.rows is not None and not 1 <= arguments.rows <= MOST_ROWS:
        raise ConfigError(f"--rows must be from 1 to {MOST_ROWS:,}, not {arguments.rows}")
    config = read_config(arguments)
    return config, read_cluster(arguments, config)


def read_cluster(arguments: argparse.Namespace, config: Config) -> Cluster:
    """The cluster of ``--cluster``, else of the recipe, else this machine's devices; as far as ``cluster.devices`` names it.

    A warning about its figures goes to standard error.
    """
    cluster = _whole_cluster(arguments, config)
    return cluster if config.cluster.devices is None else select(cluster, config.cluster.devices)


def _whole_cluster(arguments: argparse.Namespace, config: Config) -> Cluster:
    file = arguments.cluster or config.cluster.file
    if file is not None:
        if arguments.ranks is not None:
            raise ConfigError(f"--ranks cannot be given together with the cluster file {file}", hint="--devices takes some of its devices")
        cluster = _load_cluster(file, arguments)
        for warning in cluster.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        return cluster
    from whale.measure import devices_at_hand

    if arguments.ranks is not None and arguments.ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, not {arguments.ranks}")
    return devices_at_hand(arguments.ranks)


def _load_cluster(file: str, arguments: argparse.Namespace) -> Cluster:
    try:
        return load_cluster(Path(file))
    except ClusterError as fault:
        if arguments.cluster is not None or Path(file).exists():
            raise
        raise ClusterError(fault.message, where=arguments.recipe, hint="cluster.file names it, relative to the recipe") from None


def read_config(arguments: argparse.Namespace) -> Config:
    """The recipe, overridden by environment variables, and both by ``--set``, ``--profile`` and ``--devices``.

    Warnings about a profile go to standard error.
    """
    config = load_config(arguments.recipe, environment=os.environ)
    config = config.with_values(parse_pairs(arguments.set, "--set"))
    named = {"cluster.profile": arguments.profile, "cluster.devices": arguments.devices}
    named["planning.batch_rows"] = getattr(arguments, "batch_rows", None)
    config = config.with_values({key: value for key, value in named.items() if value is not None})
    if config.cluster.profile is not None:
        for warning in read_profile(config.cluster.profile).warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return config


def parse_pairs(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """``["layers=4", "name=x"]`` as ``{"layers": 4, "name": "x"}``; a value that is no JSON is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {pair!r} is not KEY=VALUE")
        if key in found:
            raise ConfigError(f"{flag} gives {key} twice")
        try:
            found[key] = parse_json(value)
        except json.JSONDecodeError:
            found[key] = value
        except ValueError as error:
            raise ConfigError(f"{flag} {key} cannot be read: {error}") from None
    return found


def _read_captured(path: Path, pairs: Sequence[str]) -> ModelGraph:
    if pairs:
        raise ConfigError(f"--arg needs FILE.py:FUNCTION; {path} is already captured")
    try:
        graph = read_value(ModelGraph, path)
        if found := list(faults_of(graph)):
            raise ValueError(first_few(found, separator="; "))
        return graph
    except OSError as error:
        raise CaptureError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{path} is not a captured model: {error}", hint="write it with `whale capture ... --output`") from None


def _kind(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def positive(text: str) -> int:
    """A whole number of at least 1 on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def check_output(path: str | None) -> None:
    """Checks, before the work, that an output file can be written."""
    if path is None:
        return
    file, folder = Path(path), Path(path).parent
    if "\0" in path:
        raise WhaleError(f"{path!r} cannot be written: a path has no NUL character")
    if not folder.is_dir():
        raise WhaleError(f"{path} cannot be written: there is no folder {folder}")
    if file.is_dir():
        raise WhaleError(f"{path} cannot be written: it is a folder")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise WhaleError(f"{path} cannot be written: permission denied")


def write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise WhaleError(f"{path} cannot be written: {error.strerror}") from None


_WHOLE = "WHALE_DEBUG=1 shows the whole traceback"


def load_function(source: str) -> Callable[..., object]:
    """The function of ``FILE.py:FUNCTION``; the file is run as a module, its folder first on the import path."""
    name, colon, function = source.rpartition(":")
    path = Path(name)
    if not colon or path.suffix != ".py":
        raise CaptureError(f"{source!r} is not FILE.py:FUNCTION, model.json or gpt:KEY=VALUE,...")
    if not path.is_file():
        raise CaptureError(f"there is no file {name}")
    module = _import_file(path)
    found = vars(module).get(function)
    if not callable(found):
        own = [each for each, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
        raise CaptureError(f"{name} has no function {function!r}", hint=did_you_mean(function, own) if own else None)
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles of the file look their module up
    with users_code(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def users_code(path: Path) -> Iterator[None]:
    """Around code of the user's file: an exception becomes a CaptureError with the last line of the file that led there."""
    try:
        yield
    except WhaleError:
        raise
    except Exception as error:
        raise CaptureError(f"{path} fails: {type(error).__name__}: {error}", where=_place_in(path, error), hint=_WHOLE) from error


def _place_in(path: Path, error: Exception) -> str | None:
    """The innermost line of a file in an error's traceback; None where there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else None


def refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Ends the command with the usage of `parser`, if there are `words` that it has left over."""
    if not words:
        return
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is None:
        parser.error(f"unknown argument {' '.join(words)}")
    known = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    found = nearest(flag, known)
    parser.error(f"unknown option {flag}" + (f" (did you mean {found!r}?)" if found else ""))

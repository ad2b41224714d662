"""What the numbers of planning are worth: each one halved and doubled, what that changes in plans, and in how many are made.

    python examples/benchmarks/constants.py --jobs 2 --json constants.json
    python examples/benchmarks/constants.py search.ranking search.form.IN_TURN --factors 0 0.5 2
    python examples/benchmarks/constants.py search.space.DEEPEST --ask "96 devices"

A number is a name in capitals at the top of a module of `whale.planning`, `whale.search` or `whale.estimate` whose value is written in
figures; whole ones are rounded, and at least 1 unless the factor is 0. Each variant is a process of its own, in which the module is read
with the other value, so that what is made of it while modules are read changes too. The questions: a GPT of 8 blocks on small clusters of
`strategies/clusters`, with the usual effort and with that of one plan; one of 2 blocks where weights, gradients and optimizer state take
60 % of all memory, and where they take more than all; a written plan whose layers are split, also in short memory; 96 devices of three
types; random graphs on 2 and 3 devices of any speed, memory and links, and on 2 devices with short memory, these with both efforts too. Of
an answer count the predicted step, and the steps that were estimated for it. Nothing runs.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests, whose random models and clusters this uses

from whale.config import Config
from whale.errors import WhaleError
from whale.hardware import load_cluster, parse_cluster
from whale.ir.cluster import Cluster
from whale.ir.graph import ModelGraph
from whale.workloads import GPT

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("planning", "search", "estimate")
CLUSTERS, PLANS = ROOT / "strategies" / "clusters", ROOT / "strategies" / "plans"
SMALL = ("a100_3090", "a100_8", "cpu_2", "v100_16gb_t4", "v100_p100_16", "v100_t4")
TIGHT = {"cpu_2": 0.6, "v100_t4": 0.6}
"""Clusters whose memory is made short, with the share of it that weights, gradients and optimizer state take."""
OFFLOADED = {"v100_16gb_t4": 1.1}
"""The same where more is kept on hosts as needed."""
SPLIT_FILLED, WIDE_FILLED = 0.1, 0.05
"""The same of the model whose layers are split, and of the one on many devices."""
WIDE = """
hosts:
  - {name: a-, count: 4, devices: 8 x A100-40GB}
  - {name: v-, count: 4, devices: 8 x V100-32GB}
  - {name: t-, count: 4, devices: 8 x T4}
network: ethernet-50g"""
STATE_BYTES = 16
"""Of a parameter: in float32 with Adam."""
NUM_DRAWN = 12
SHORT = (5, 7, 11, 15, 19, 21, 23, 33, 35)
"""Cases of `regret.py` that are planned quickly, with the memory that they have there with `--memory`."""
SAME = 1e-6
"""Steps that differ by a smaller share are the same."""


@dataclass(frozen=True)
class Question:
    """What is planned.

    Attributes:
        name: in short.
        graph, cluster, rows: the values.
        plan: a written one; None for a search.
        config: settings.
    """

    name: str
    graph: ModelGraph
    cluster: Cluster
    rows: int
    plan: Path | None = None
    config: Config = field(default_factory=Config)

    @property
    def hurried(self) -> Question:
        """The same with the effort of one plan."""
        return replace(self, name=f"{self.name} hurried", config=Config({"planning.effort": 1}))


@dataclass(frozen=True)
class Answer:
    """Seconds of a step, None where nothing fits; and the steps that were estimated for it."""

    seconds: float | None
    num_estimates: int


@dataclass(frozen=True)
class Number:
    """A number of the planner by its module, its name and its value."""

    module: str
    name: str
    value: float

    def times(self, factor: float) -> float:
        own = self.value * factor
        return own if isinstance(self.value, float) else max(min(1, round(own)) if factor == 0 else 1, round(own))

    def __str__(self) -> str:
        return f"{self.module.removeprefix('whale.')}.{self.name}"


def numbers() -> Iterator[Number]:
    """All of them, in the order of the files."""
    for part in PARTS:
        for path in sorted((ROOT / "whale" / part).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name, value in _assigned(ast.parse(path.read_text())):
                if all(isinstance(node, ast.Constant | ast.BinOp | ast.operator) for node in ast.walk(value)):
                    own = eval(compile(ast.Expression(value), module, "eval"))
                    if isinstance(own, int | float) and not isinstance(own, bool):
                        yield Number(module, name, own)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            yield node.targets[0].id, node.value


class _Changed(SourceFileLoader):
    """Reads a module in which one number has another value."""

    number: Number
    value: float

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path))
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == self.number.name:
                node.value = ast.copy_location(ast.Constant(self.value), node.value)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, number: Number, value: float) -> None:
        self.number, self.value = number, value

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.number.module else None
        if spec is not None and spec.origin is not None:
            loader = _Changed(fullname, spec.origin)
            loader.number, loader.value = self.number, self.value
            spec.loader = loader
        return spec


def questions() -> list[Question]:
    """Those on stated clusters; models are captured."""
    graph, found = GPT(layers=8, hidden=1024, heads=16, sequence=512, vocabulary=32_000).graph(), list[Question]()
    for name in SMALL:
        found.append(Question(name, graph, load_cluster(CLUSTERS / f"{name}.yaml"), 64))
        found.append(found[-1].hurried)
    short = GPT(layers=2, hidden=1024, heads=16, sequence=512, vocabulary=32_000).graph()
    offloads = Config({"memory.offload": "auto", "memory.zero": "0"})
    for name, filled in (TIGHT | OFFLOADED).items():
        own = Config() if name in TIGHT else offloads
        found.append(Question(f"{name} tight", short, _tight(load_cluster(CLUSTERS / f"{name}.yaml"), short, filled), 32, config=own))
    small, hosts = GPT(layers=8, hidden=512, heads=8, sequence=128, vocabulary=1024).graph(), load_cluster(CLUSTERS / "a100_8.yaml")
    found.append(Question("megatron", small, hosts, 16, PLANS / "megatron.yaml"))
    found.append(Question("megatron tight", small, _tight(hosts, small, SPLIT_FILLED), 16, PLANS / "megatron.yaml"))
    deep = GPT(layers=24, hidden=1536, heads=16, sequence=512, vocabulary=50_304).graph()
    found.append(Question("96 devices", deep, parse_cluster(WIDE), 384))
    found.append(Question("96 devices tight", deep, _tight(parse_cluster(WIDE), deep, WIDE_FILLED), 384))
    return found


def _tight(cluster: Cluster, graph: ModelGraph, filled: float) -> Cluster:
    """The cluster with as much less or more memory on all devices as makes the state fill this share of it."""
    state = STATE_BYTES * sum(each.spec.num_elements for each in graph.parameters)
    share = state / filled / sum(device.memory for device in cluster.devices) / Config().memory.fraction
    hosts = (replace(host, devices=tuple(replace(own, memory=int(own.memory * share)) for own in host.devices)) for host in cluster.hosts)
    return replace(cluster, hosts=tuple(hosts))


def _drawn() -> Iterator[Question]:
    from tests.unit.search.many import drawn_cluster, drawn_graph  # it has the search, which is read with the other value first

    for number in range(NUM_DRAWN):
        draw = random.Random(number)
        graph = drawn_graph(draw, scoped=False)
        yield Question(f"drawn {number}", graph, drawn_cluster(draw, 2 + number % 2), draw.randint(1, 9))


def _short() -> list[Question]:
    """Random graphs with short memory. By the planner as it is: to be called in a process of its own."""
    from regret import drawn_case, scarce

    found = list[Question]()
    for number in SHORT:
        *_, graph, cluster, rows = drawn_case(number, 2)
        found.append(Question(f"short {number}", graph, scarce(number, graph, cluster, rows), rows))
        found.append(found[-1].hurried)
    return found


def answers(asked: Sequence[Question], only: Sequence[str], variant: tuple[Number, float] | None) -> dict[str, Answer]:
    """The answer to each question with one number changed, in a process that has not planned yet.

    `only`: those whose names begin like this; all where there are none.
    """
    assert not any(f"whale.{part}" in sys.modules for part in PARTS), "modules are read with the other value"
    if variant is not None:
        sys.meta_path.insert(0, _Finder(*variant))
    from whale.planning import pricing
    from whale.search.deciding import decide

    estimate_with, num_estimates = pricing.estimate_with, 0  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> Any:
        nonlocal num_estimates
        num_estimates += 1
        return estimate_with(*arguments)

    pricing.estimate_with = counted  # type: ignore[attr-defined]
    found = dict[str, Answer]()
    for question in (*asked, *_drawn()):
        if only and not question.name.startswith(tuple(only)):
            continue
        num_estimates = 0
        try:
            seconds = decide(question.plan, question.graph, question.cluster, question.config, rows=question.rows)[1].step_seconds
        except WhaleError:
            found[question.name] = Answer(None, num_estimates)
        else:
            found[question.name] = Answer(seconds, num_estimates)
    return found


def compared(plain: Mapping[str, Answer], other: Mapping[str, Answer]) -> str:
    """What changed, in words."""
    changes, lost, won = dict[str, float](), list[str](), list[str]()
    for name, own in plain.items():
        new = other[name].seconds
        if own.seconds is None or new is None:
            (lost if new is None else won).extend([name] if new != own.seconds else [])
        elif abs(new / own.seconds - 1) > SAME:
            changes[name] = new / own.seconds - 1
    made = sum(each.num_estimates for each in other.values()) / sum(each.num_estimates for each in plain.values()) - 1
    said = [f"{len(changes)} of {len(plain)} steps differ" if changes else "all steps equal"]
    if changes:
        worst, best = max(changes, key=changes.__getitem__), min(changes, key=changes.__getitem__)
        said[0] += f", {statistics.fmean(changes.values()):+.2%} in their mean"
        said += [f"{changes[name]:+.2%} {name}" for name in dict.fromkeys((worst, best))]
    said += [f"no plan: {', '.join(lost)}"] if lost else []
    said += [f"a plan: {', '.join(won)}"] if won else []
    return "; ".join([*said, f"{made:+.1%} estimates"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", metavar="NAME", help="numbers whose module and name begin like this (default: all)")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 2.0], metavar="F", help="of each number (default: %(default)s)")
    parser.add_argument("--ask", nargs="+", default=(), metavar="NAME", help="questions whose names begin like this (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers here")
    options = parser.parse_args()
    chosen = [each for each in numbers() if not options.only or str(each).startswith(tuple(options.only))]
    variants = [(each, each.times(factor)) for each in chosen for factor in options.factors]
    variants = [(each, value) for each, value in dict.fromkeys(variants) if value != each.value]
    found = dict[str, dict[str, Answer]]()

    def write(plain: Mapping[str, Answer]) -> None:
        if options.json is not None:
            written = {name: {key: vars(each) for key, each in own.items()} for name, own in {"as it is": plain, **found}.items()}
            options.json.write_text(json.dumps(written, indent=1) + "\n")

    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        asked = [*questions(), *pool.apply(_short)]
        results = pool.imap(partial(answers, asked, options.ask), [None, *variants], chunksize=1)
        plain = next(results)
        write(plain)
        for (number, value), own in zip(variants, results, strict=True):
            found[f"{number} = {value:g}"] = own
            print(f"{number} = {value:g} for {number.value:g}: {compared(plain, own)}", flush=True)
            write(plain)


if __name__ == "__main__":
    main()

"""What one machine with GPUs can prove, in order of worth: `make gpu`, or a part at a time.

    python -m tests.gpu.prove                  # all parts, 40 minutes at most
    python -m tests.gpu.prove --part 2         # 10 minutes at most
    python -m tests.gpu.prove --list           # what is run, and what is expected

Each check is a command with a limit in seconds; its output goes to a file, and its line says what is expected, what was found, and
whether that is so. Without a GPU what can runs on the stand-in device, and the others are named as not run. Nothing is installed, and
no network is used.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PART_SECONDS = 600
LARGEST_GAP = 0.05
"""Of bytes at the peak from those of the plan."""

PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu")
BY_PRECISION = "law_by_precision"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
BENCHMARK = "examples/benchmarks/gpu.py"

Judge = Callable[[str, Path], str | None]
"""Takes what a check has printed and the file of its figures; returns what is not as expected."""


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        part: of at most ten minutes.
        seconds: that it may take.
        command: arguments of Python; ``{json}`` is a file for figures in ``{folder}``, ``{ranks}`` the number of GPUs, at least 2.
        expected: in words.
        num_gpus: that it needs; 0 for none, where the stand-in device serves without.
        modules: that it needs besides torch and Whale.
        judge: whether what is expected was found; a command that fails never is.
    """

    name: str
    part: int
    seconds: int
    command: tuple[str, ...]
    expected: str
    num_gpus: int = 0
    modules: tuple[str, ...] = ()
    judge: Judge = lambda text, figures: None


def nothing_skipped(text: str, _: Path) -> str | None:
    skipped = re.findall(r"^SKIPPED .*", text, re.MULTILINE)
    return f"{len(skipped)} skipped: {skipped[0]}" if skipped and num_gpus() else None


def _cases(figures: Path) -> Mapping[str, Mapping[str, Any]]:
    return {name: each for name, each in json.loads(figures.read_text()).items() if isinstance(each, dict)}


def as_fast_as_torch(_: str, figures: Path) -> str | None:
    slow = [f"{name} {each['ratio']:.3f}" for name, each in _cases(figures).items() if each["ratio"] < 1.0]
    return f"below 1.0: {', '.join(slow)}" if slow else None


def bytes_as_planned(_: str, figures: Path) -> str | None:
    gaps = {name: each["whale_bytes"] / each["plan_bytes"] - 1 for name, each in _cases(figures).items()}
    far = [f"{name} {gap:+.1%}" for name, gap in gaps.items() if abs(gap) > LARGEST_GAP]
    return f"bytes at the peak from the plan's: {', '.join(far)}" if far else None


def no_more_kernels(_: str, figures: Path) -> str | None:
    more = {name: each["whale_kernels"] - each["peer_kernels"] for name, each in _cases(figures).items()}
    many = [f"{name} {count:+}" for name, count in more.items() if count > 4]
    return f"kernels more than torch: {', '.join(many)}" if many else None


def _benchmark(name: str, part: int, seconds: int, expected: str, judge: Judge, *options: str) -> Check:
    """The part of that name of the benchmark of one GPU."""
    command = (BENCHMARK, "--only", name, *options, "--json", "{json}")
    return Check(name, part, seconds, command, expected, num_gpus=1, modules=("transformers", "torchvision"), judge=judge)


CHECKS = (
    Check("import", 1, 60, ("-m", "tests.gpu.on_gpus", "versions"), "versions are printed; torch has kernels for this GPU"),
    Check(
        "tier",
        1,
        540,
        (*PYTEST, "tests/gpu", "-k", f"not {BY_PRECISION}"),
        "the GPU tier passes, and on a GPU nothing is skipped",
        modules=("pytest", "hypothesis"),
        judge=nothing_skipped,
    ),
    _benchmark(
        "eager",
        2,
        600,
        "Whale is at least as fast as the plain loop in each case: ratios of 1.0 and more",
        as_fast_as_torch,
        "--pairs",
        "4",
    ),
    _benchmark(
        "compiled", 3, 280, "runtime.compile is at least as fast as torch.compile: ratios of 1.0 and more", as_fast_as_torch, "--pairs", "3"
    ),
    _benchmark("offload", 3, 150, "bytes at the peak are the plan's within 5 %", bytes_as_planned),
    _benchmark("zero", 3, 170, "bytes at the peak of each rank are the plan's within 5 %, for ZeRO 0 to 3", bytes_as_planned),
    Check(
        "nccl",
        4,
        60,
        (*TORCHRUN, "1", "-m", "tests.gpu.on_gpus", "backend"),
        "one rank: a group is made, sums and barriers return; which types the backend takes is printed",
    ),
    Check("probe", 4, 80, ("-m", "whale", "probe", "--rounds", "3", "--output", "{folder}/cluster.yaml"), "a cluster file is written"),
    Check(
        "precisions",
        4,
        200,
        (*PYTEST, "tests/gpu/test_ranks_on_one_gpu.py", "-k", BY_PRECISION),
        "several ranks on one GPU by Gloo: the law in three precisions under each plan",
        modules=("pytest", "hypothesis"),
        judge=nothing_skipped,
    ),
    _benchmark("kernels", 4, 90, "a step launches at most 4 kernels more than the plain loop's", no_more_kernels),
    Check(
        "contexts",
        4,
        40,
        (*TORCHRUN, "2", "-m", "tests.gpu.on_gpus", "contexts"),
        "each rank has a context on its own GPU and on no other",
        num_gpus=1,
        modules=("pynvml",),
    ),
    Check(
        "laws",
        4,
        90,
        (*TORCHRUN, "{ranks}", "-m", "tests.gpu.on_gpus", "laws"),
        "a rank per GPU over NCCL (without GPUs two over Gloo): losses and weights are those of the plain loop",
        modules=("pytest", "hypothesis"),
    ),
    Check(
        "overlap",
        4,
        20,
        (*TORCHRUN, "{ranks}", "-m", "tests.gpu.on_gpus", "overlap"),
        "a sum over NCCL beside products takes less than both one after the other",
        num_gpus=2,
    ),
    Check(
        "receives",
        4,
        20,
        (*TORCHRUN, "{ranks}", "-m", "tests.gpu.on_gpus", "receives"),
        "a pipeline that receives messages early, and one that receives them late: the times of both are printed",
        num_gpus=2,
    ),
)


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def lacking(check: Check) -> str | None:
    """Why a check cannot be run here."""
    if missing := [name for name in check.modules if find_spec(name) is None]:
        return f"no module {', '.join(missing)}"
    return f"needs {check.num_gpus} GPU{'s' * (check.num_gpus > 1)}, here are {num_gpus()}" if num_gpus() < check.num_gpus else None


def run(check: Check, folder: Path) -> tuple[str, str]:
    """Runs a check; returns ``ok``, ``FAILED`` or ``not run``, and why."""
    if reason := lacking(check):
        return "not run", reason
    figures, said = folder / f"{check.name}.json", folder / f"{check.name}.txt"
    figures.unlink(missing_ok=True)
    ranks = str(num_gpus() if num_gpus() > 1 else 2)
    words = [sys.executable, *(word.format(json=figures, folder=folder, ranks=ranks) for word in check.command)]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    try:
        with said.open("w") as file:
            environment = {**os.environ, "PYTHONPATH": paths}
            code = subprocess.run(
                words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=check.seconds, env=environment, check=False
            ).returncode
    except subprocess.TimeoutExpired:
        return "FAILED", f"not done in {check.seconds} s: {said}"
    text = said.read_text()
    if code:
        return "FAILED", f"exit code {code}: {said}\n{_last_lines(text)}"
    try:
        fault = check.judge(text, figures)
    except (KeyError, OSError, ValueError) as error:
        return "FAILED", f"its figures cannot be read: {error!r}"
    return ("ok", _last_lines(text, 1)) if fault is None else ("FAILED", fault)


def _last_lines(text: str, count: int = 8) -> str:
    return "\n".join(line for line in text.strip().splitlines()[-count:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=sorted({check.part for check in CHECKS}), help="one part; all by default")
    parser.add_argument("--only", metavar="NAME", choices=[check.name for check in CHECKS], help="one check")
    parser.add_argument("--output", type=Path, default=Path("gpu_proofs"), metavar="FOLDER", help="for what the checks print")
    parser.add_argument("--list", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    folder, found = options.output.resolve(), dict[str, str]()
    print(f"{num_gpus() or 'no'} GPUs" + ("" if num_gpus() else ": what can runs on the stand-in device, which computes on the CPU"))
    for check in CHECKS:
        if options.part not in (None, check.part) or options.only not in (None, check.name):
            continue
        print(f"== part {check.part}, {check.name} (at most {check.seconds} s): expected: {check.expected}", flush=True)
        if options.list:
            continue
        begun = time.monotonic()
        found[check.name], reason = run(check, folder)
        print(f"   {found[check.name]} after {time.monotonic() - begun:.0f} s: {reason}", flush=True)
    for verdict in ("ok", "FAILED", "not run"):
        if names := [name for name, each in found.items() if each == verdict]:
            print(f"{verdict}: {', '.join(names)}")
    return int("FAILED" in found.values())


if __name__ == "__main__":
    sys.exit(main())

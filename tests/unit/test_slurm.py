"""The example for Slurm starts one launcher on each node: of a job, and of all components of a heterogeneous one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "launchers" / "slurm.sh"

# `srun` as it is with one task per node: only the first component unless it is told of more; ranks count through all components.
SRUN = """#!/bin/bash
names="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
while [[ "$1" == --* ]]; do
    case "$1" in --het-group=0-1) names="$names $(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")";; esac
    shift
done
rank=0
for name in $names; do
    SLURM_PROCID=$rank "$@" || exit $?
    rank=$((rank + 1))
done
"""
SCONTROL = """#!/bin/bash
case "$3" in big) echo big;; "small[1-2]") echo small1; echo small2;; *) echo "$@" >> scontrol.log;; esac
"""
WHALE = """#!/bin/bash
echo "$@" >> whale.log
[[ "$*" == *probe* ]] && touch "${@: -1}"
exit ${CODE:-0}
"""

HETEROGENEOUS = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "big", "SLURM_JOB_NODELIST_HET_GROUP_1": "small[1-2]"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("whale", WHALE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def run(place: Path, **variables: str) -> int:
    environment = {**os.environ, "PATH": f"{place}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **variables}
    words = ["bash", str(EXAMPLE), "train.py", "--steps", "3"]
    return subprocess.run(words, cwd=place, env=environment, check=False, timeout=60).returncode


@pytest.mark.parametrize(
    ("variables", "first", "num_nodes", "cluster"),
    [
        ({"SLURM_JOB_NODELIST": "small[1-2]"}, "small1", 2, "cluster-small[1-2].yaml"),
        ({"SLURM_JOB_NODELIST": "big", **HETEROGENEOUS}, "big", 3, "cluster-big+small[1-2].yaml"),
    ],
    ids=["a job", "of two components"],
)
def test_each_node_has_its_launcher(place: Path, variables: dict[str, str], first: str, num_nodes: int, cluster: str) -> None:
    assert run(place, **variables) == 0 == run(place, **variables)
    starts = [
        f"run --nnodes {num_nodes} --node-rank {rank} --rdzv-backend static --rdzv-endpoint {first}:29500 --nproc-per-node gpu"
        for rank in range(num_nodes)
    ]
    probes, trains = ([f"{start} {words}" for start in starts] for words in (f"-m whale probe --output {cluster}", "train.py --steps 3"))
    assert (place / "whale.log").read_text().splitlines() == [*probes, *trains, *trains]


def test_what_was_told_to_end_is_queued_again(place: Path) -> None:
    (place / "there.yaml").touch()
    assert run(place, SLURM_JOB_NODELIST="big", CLUSTER="there.yaml", CODE="143") == 143
    assert (place / "scontrol.log").read_text() == "requeue 7\n"

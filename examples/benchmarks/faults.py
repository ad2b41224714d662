"""Faults in a run of four ranks on two "hosts" (launchers of `whale run --elastic`): what each costs, and whether losses stay the same.

    python examples/benchmarks/faults.py --faults 10 --json faults.json

The seed draws what happens, where, and at which step:

    KILL, STOP, TERM   a rank is killed, stopped or told to end
    host               a launcher is killed, and its ranks with it; it comes back
    network            a host is cut off, and comes back
    disk               no checkpoint can be written any more, then a rank is killed
    memory             no host has room in /dev/shm any more, then a rank is killed

The last three need Linux namespaces and mounts, which root has; else they are left out. The losses are held to those of one rank that
nothing happens to. The seconds from a fault to the next new step fall into:

    notice    until a launcher has seen ranks end
    meet      survivors leave what they hold and end, launchers meet, ranks begin anew
    import    of torch and whale
    open      capture, plan, process groups, weights
    state     from memory of the survivors, or the newest checkpoint
    first     the step itself
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

SIGNALS, APART = ("KILL", "STOP", "TERM", "host"), ("network", "disk", "memory")
PARTS = ("notice", "meet", "import", "open", "state", "first")
RANKS_OF_HOST, NUM_HOSTS, SILENT_SECONDS = 2, 2, 4
STEPS_OF_SAVE = 20
UNSHARE = ("unshare", "--mount", "--net", "--uts", *(() if os.geteuid() == 0 else ("--map-root-user",)))
NETWORK = "10.77.0"
LAST = "last_step"
BEGUN = time.time()


def train(folder: Path) -> None:
    """What each rank does until the last step, which a file says: it tells each event with its time."""
    import torch
    import torch.distributed as dist

    import whale

    imported = time.time()
    torch.manual_seed(0)
    samples = list(torch.randn(4096, 64, dtype=torch.float64))
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    engine = whale.parallelize(
        torch.nn.Sequential(*layers).double(),
        loss=lambda output, batch: (output - batch).square().mean(),
        optimizer=partial(torch.optim.Adam, lr=1e-3),
        batch=torch.stack(samples[:64]),
    )
    opened = time.time()
    loader = engine.loader(samples, global_batch_size=64, shuffle=True)
    engine.resume(folder / "checkpoints")
    resumed = time.time()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    marks = {"size": size, "begun": BEGUN, "imported": imported, "opened": opened, "resumed": resumed}

    def tell(**more: object) -> None:
        if rank == 0:
            with open(folder / "steps.jsonl", "a") as file:
                file.write(json.dumps({"step": engine.step_number, **more, **marks, "stepped": time.time()}) + "\n")

    def is_done() -> bool:
        return (folder / LAST).exists() and engine.step_number >= int((folder / LAST).read_text())

    while not is_done():
        for batch in loader:
            tell(loss=float(engine.step(batch)))
            if engine.step_number % STEPS_OF_SAVE == 0:
                try:
                    engine.save(folder / "checkpoints" / f"step_{engine.step_number}", keep=2)
                except whale.CheckpointError as error:  # the disk is full: training goes on
                    tell(unsaved=str(error))
            if is_done():
                break
            time.sleep(0.02)  # a step of some size
    engine.close()


class Host:
    """A launcher and its ranks; where they can be had, with a network and a /dev/shm of its own.

    Args:
        number: from 0.
        command, environment: of the launcher.
        log: what all launchers say.
        is_apart: whether it has its own.
    """

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str], log: Any, *, is_apart: bool) -> None:
        self._command, self._environment, self._log = command, environment, log
        self.card, self._inside = f"card{number}", tuple[str, ...]()
        self.launcher: subprocess.Popen[bytes] | None = None
        self._home: subprocess.Popen[bytes] | None = None
        if is_apart:
            begin = f"echo host{number} > /proc/sys/kernel/hostname; mount -t tmpfs -o size=16m none /dev/shm; ip link set lo up; exec cat"
            self._home = subprocess.Popen([*UNSHARE, "sh", "-c", begin], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._home.stdin is not None and self._home.stdout is not None
            self._home.stdin.write(b"\n")
            self._home.stdin.flush()
            self._home.stdout.readline()  # it is at home
            self._inside = ("nsenter", "--target", str(self._home.pid), "--mount", "--net", "--uts")
            call("ip", "link", "add", self.card, "master", "bridge0", "type", "veth", "peer", "name", "eth0", "netns", str(self._home.pid))
            call("ip", "link", "set", self.card, "up")
            call(*self._inside, "ip", "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
            call(*self._inside, "ip", "link", "set", "eth0", "up")

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as this process sees it."""
        return Path("/dev/shm" if self._home is None else f"/proc/{self._home.pid}/root/dev/shm")

    def begin(self) -> None:
        """Starts the launcher, if none is there."""
        if self.launcher is None or self.launcher.poll() is not None:
            self.launcher = subprocess.Popen([*self._inside, *self._command], stderr=self._log, env=self._environment)

    def end(self) -> None:
        """Ends it and all that it has."""
        for process in (self.launcher, self._home):
            if process is not None:
                process.kill()
                process.wait()


def call(*words: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(words, check=True)


@contextmanager
def filled(*folders: Path) -> Iterator[None]:
    """No room is left there."""
    files = [folder / "filling" for folder in folders]
    for file in files:
        with suppress(OSError), open(file, "wb", buffering=0) as room:
            while True:
                room.write(bytes(1 << 16))
    try:
        yield
    finally:
        for file in files:
            file.unlink()


@contextmanager
def cut(host: Host) -> Iterator[None]:
    """What it sends is lost, and what is sent to it."""
    call("ip", "link", "set", host.card, "down")
    try:
        yield
    finally:
        call("ip", "link", "set", host.card, "up")


class Told:
    """What rank 0 tells.

    Args:
        folder: of the run.
        limit: seconds until a run that tells nothing new is given up.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self._file, self._limit, self._read = folder / "steps.jsonl", limit, 0
        self.all: list[dict[str, Any]] = []

    def look(self) -> list[dict[str, Any]]:
        """All that there is by now."""
        if self._file.exists():
            with open(self._file, "rb") as file:
                file.seek(self._read)
                lines = [line for line in file.readlines() if line.endswith(b"\n")]
            self._read += sum(map(len, lines))
            self.all += map(json.loads, lines)
        return self.all

    def wait(self, what: str, is_it: Callable[[dict[str, Any]], bool], meanwhile: Sequence[Host] = ()) -> dict[str, Any]:
        """The first that is so; until then hosts come back that have ended."""
        until, seen = time.time() + self._limit, 0
        while time.time() < until:
            for told in self.look()[seen:]:
                if is_it(told):
                    return told
            seen = len(self.all)
            for host in meanwhile:
                host.begin()
            time.sleep(0.02)
        raise TimeoutError(f"not within {self._limit:g} s: {what}")


def cause(folder: Path, told: Told, hosts: Sequence[Host], kind: str, host: Host, rank: int) -> dict[str, Any]:
    """One fault, and what it costs; what it has taken away is there again at the end."""
    with ExitStack() as lasts:
        if kind == "disk":
            since = time.time()
            lasts.enter_context(filled(folder / "checkpoints"))
            told.wait("a checkpoint is not written", lambda each: "unsaved" in each and each["stepped"] > since)
        elif kind == "memory":
            lasts.enter_context(filled(*(each.memory for each in hosts)))
        said, when, step = (folder / "log").stat().st_size, time.time(), max(each["step"] for each in told.look())
        if kind == "network":
            lasts.enter_context(cut(host))
        elif kind == "host":
            assert host.launcher is not None
            host.launcher.kill()
        else:
            how = kind if kind in SIGNALS else "KILL"
            os.kill(int((folder / f"pid_{rank}").read_text()), signal.Signals[f"SIG{how}"])
        first = told.wait(f"a step after {kind} after step {step}", lambda each: "loss" in each and each["begun"] >= when)
        new = told.wait(f"a new step after {kind} after step {step}", lambda each: each["begun"] >= when and each["step"] > step)
    log = (folder / "log").read_bytes()[said:].decode()
    (source, ago), *_ = re.findall(r"resumes after step \d+, from (memory of \d+ ranks?|the start|[^;\s]+)(?:; lost: ([\d.]+) s)?", log)
    times = [
        when,
        new["resumed"] - float(ago) if ago else when,
        *(new[name] for name in ("begun", "imported", "opened", "resumed", "stepped")),
    ]
    parts = {name: max(stop - start, 0.0) for name, (start, stop) in zip(PARTS, pairwise(times), strict=True)}
    seconds, again = new["stepped"] - when, max(step + 1 - first["step"], 0)  # some end a step yet
    print(f"{kind} after step {step}: {seconds:.1f} s, {again} steps done again, from {source}", flush=True)
    return {"kind": kind, "step": step, "steps_done_again": again, "seconds": seconds, "source": source, **parts}


def measure(folder: Path, faults: int, seed: int, kinds: Sequence[str], gap: int, limit: float) -> dict[str, Any]:
    """A run with its faults, and the comparison."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    draw, is_apart, checkpoints = random.Random(seed), {*kinds} & {*APART} != set(), folder / "checkpoints"
    environment, address = {**os.environ, "WHALE_PLANNING_SEARCH": "off"}, "localhost"
    checkpoints.mkdir()
    if is_apart:
        environment["GLOO_SOCKET_IFNAME"], address = "eth0", f"{NETWORK}.254"
        call("mount", "-t", "tmpfs", "-o", "size=16m", "none", str(checkpoints))
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "bridge0", "type", "bridge")
        call("ip", "link", "set", "bridge0", "up")
        call("ip", "address", "add", f"{address}/24", "dev", "bridge0")
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    num_ranks, told, found = NUM_HOSTS * RANKS_OF_HOST, Told(folder, limit), list[dict[str, Any]]()
    with open(folder / "log", "w") as log, ExitStack() as hosts_end:
        hosts = []
        for number in range(NUM_HOSTS):
            place = ["--rdzv-endpoint", f"{address}:{store.port}", "--rdzv-conf", f"is_host=0,keep_alive_max_attempt={SILENT_SECONDS}"]
            place += ["--local-addr", f"{NETWORK}.{number + 1}" if is_apart else address]
            words = [*place, "--ranks", str(RANKS_OF_HOST), __file__, "--rank-of", str(folder)]
            command = [sys.executable, "-m", "whale", "run", "--elastic", f"1:{NUM_HOSTS}", *words]
            hosts.append(Host(number, command, environment, log, is_apart=is_apart))
            hosts_end.callback(hosts[-1].end)
        begun = 0.0
        while True:

            def trains(each: dict[str, Any], since: float = begun) -> bool:
                return bool(each["size"] == num_ranks and each["begun"] >= since)

            told.wait("all ranks train", trains, meanwhile=hosts)
            step = told.all[-1]["step"]
            if len(found) == faults:
                break
            step += draw.randint(2, gap)
            told.wait(f"step {step}", lambda each, step=step: each["step"] >= step)
            found.append(cause(folder, told, hosts, draw.choice(kinds), draw.choice(hosts), draw.randrange(num_ranks)))
            begun = told.all[-1]["begun"]
        (folder / "part").write_text(str(step + 2 * STEPS_OF_SAVE))
        (folder / "part").rename(folder / LAST)
        codes = [host.launcher.wait(limit) for host in hosts if host.launcher is not None]
    alone = folder / "alone"
    alone.mkdir()
    (folder / LAST).rename(alone / LAST)
    subprocess.run([sys.executable, __file__, "--rank-of", str(alone)], check=True)
    losses, undisturbed = (
        {each["step"]: each["loss"] for each in seen if "loss" in each} for seen in (told.look(), Told(alone, limit).look())
    )
    again = {kind: max(each["steps_done_again"] for each in found if each["kind"] == kind) for kind in {each["kind"] for each in found}}
    return {
        "seed": seed,
        "num_faults": len(found),
        "exit_codes": codes,
        "worst_loss_error": max(abs(losses[step] / loss - 1) for step, loss in undisturbed.items()),
        "most_steps_done_again": again,
        "median_seconds": {name: statistics.median(each[name] for each in found) for name in ("seconds", *PARTS)},
        "faults": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--faults", type=int, default=10, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--kinds", nargs="+", choices=SIGNALS + APART, default=SIGNALS + APART, help="what may happen")
    parser.add_argument("--gap", type=int, default=20, help="most steps from one fault to the next")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds until a run that stands still is given up")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures are written")
    parser.add_argument("--keep-log", type=Path, metavar="FILE", help="where what launchers and ranks say is written")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        train(options.rank_of)
        return
    kinds = options.kinds
    if not options.apart and {*kinds} & {*APART}:
        with suppress(FileNotFoundError):
            if subprocess.run([*UNSHARE, "ip", "link"], capture_output=True).returncode == 0:
                os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, *sys.argv, "--apart"])
        kinds = [kind for kind in kinds if kind in SIGNALS]
        print("namespaces cannot be had here: no network is cut, and no disk or memory is full", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # launchers end with this process
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        try:
            found = measure(folder, options.faults, options.seed, kinds, options.gap, options.limit)
        finally:
            if options.keep_log is not None and (folder / "log").exists():
                options.keep_log.write_text((folder / "log").read_text())
            subprocess.run(["umount", str(folder / "checkpoints")], capture_output=True)
    print(json.dumps({name: value for name, value in found.items() if name != "faults"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

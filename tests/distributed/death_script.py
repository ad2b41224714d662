"""Run by test_launch.py: ranks that wait for one another until rank 1 kills itself, or fails, in the middle of an action."""

import os
import signal
import sys

import torch
import torch.distributed as dist

from whale.runtime.execute.status import StatusBoard

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
board = StatusBoard.open(rank)
value = torch.zeros(1)
board.set("0F0")
dist.barrier()
if rank == 1:
    board.set("1F3")
    for source in (0, 2):  # both peers have stated what they wait for
        dist.recv(value, source)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("rank 1 has had enough")
action = "0RECV_B3" if rank == 0 else "2RECV_F3"
board.set(action, (1,))
dist.send(value, 1)
try:
    dist.recv(value, 1)
except RuntimeError:  # as the ranks of an engine do, it leaves the one that failed time to end first
    signal.pause()

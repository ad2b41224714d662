"""What ``--elastic`` sets of torchrun, and when ranks that fail are given up."""

from __future__ import annotations

import re

import pytest

from whale.cli import launch
from whale.cli.deaths import MOST_IN_VAIN, Deaths
from whale.cli.elastic import MOST_RESTARTS, be_elastic
from whale.errors import ConfigError
from whale.runtime.execute.status import RankStatus


def test_torchruns_rendezvous_is_set_and_the_users_words_win() -> None:
    flags = ["--elastic", "2:128", "--rdzv-endpoint", "first:29500"]
    arguments = launch.make_parser().parse_args([*flags, "train.py"])
    assert be_elastic(arguments)["WHALE_CLUSTER_PARTIAL"] == "true"
    assert (arguments.nnodes, arguments.rdzv_backend, arguments.max_restarts) == ("2:128", "c10d", MOST_RESTARTS)
    assert arguments.rdzv_conf == "last_call_timeout=3,keep_alive_interval=3,keep_alive_max_attempt=4"
    arguments = launch.make_parser().parse_args([*flags, "--rdzv-conf", "last_call_timeout=60", "--max-restarts", "5", "train.py"])
    be_elastic(arguments)
    assert arguments.max_restarts == 5 and arguments.rdzv_conf.endswith(",last_call_timeout=60")
    alone = launch.make_parser().parse_args(["--elastic", "1", "train.py"])
    be_elastic(alone)
    assert (alone.nnodes, alone.rdzv_endpoint, alone.local_addr) == ("1:1", "localhost:0", "localhost")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elastic", "3:2"], "--elastic 3:2 is not MIN:MAX"),
        (["--elastic", "0:2"], "--elastic 0:2 is not MIN:MAX"),
        (["--elastic", "two"], "--elastic two is not MIN:MAX"),
        (["--elastic", "1:2"], "--elastic 1:2 needs --rdzv-endpoint HOST:PORT"),
        (["--elastic", "1:2", "--nnodes", "2"], "--nnodes cannot be given together with --elastic"),
        (["--elastic", "1:2", "--standalone"], "--standalone cannot be given together with --elastic"),
    ],
)
def test_bad_numbers_of_launchers_start_nothing(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        launch.run([*words, "train.py"])


def test_ranks_that_fail_by_themselves_without_a_step_between_are_given_up() -> None:
    deaths = Deaths()
    waited = RankStatus(0, 1, "failed", "1RECV_F0", (1,), 1, 0.0)
    for step in (3, 4):  # each new step counts from the start
        assert not any(deaths.fell(None, step, by_itself=True) for _ in range(MOST_IN_VAIN))
    assert not deaths.fell(waited, 4, by_itself=True), "it failed because of another"
    assert not deaths.fell(None, 4, by_itself=False), "it was told to end"
    assert deaths.fell(None, 4, by_itself=True)

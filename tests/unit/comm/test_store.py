"""At which addresses rank 0's own store listens."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

from whale.comm.world import _own_store


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_free(address: str, port: int) -> bool:
    """Whether nothing listens there, nor at all addresses."""
    try:
        socket.create_server((address, port)).close()
    except OSError:
        return False
    return True


def environment(monkeypatch: pytest.MonkeyPatch, host: str, port: int, rank: int = 0) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("127.0.0.5", "127.0.0.5")])
def test_it_listens_at_the_named_address_alone(monkeypatch: pytest.MonkeyPatch, host: str, address: str) -> None:
    environment(monkeypatch, host, port := free_port())
    found = _own_store(timedelta(seconds=30))
    assert found is not None and found[1:] == (0, 1)
    assert not is_free(address, port) and is_free("127.0.0.9", port)
    client = dist.TCPStore(host, port, 1, False, timedelta(seconds=30))  # type: ignore[attr-defined]
    client.set("a", "b")
    assert found[0].get("a") == b"b"


def test_torch_opens_or_finds_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    port, limit = free_port(), timedelta(seconds=30)
    for host in ("first", "192.0.2.7", ""):  # a name that others may know as another address; not of this host; none
        environment(monkeypatch, host, port)
        assert _own_store(limit) is None
    environment(monkeypatch, "localhost", port, rank=1)
    assert _own_store(limit) is None
    environment(monkeypatch, "localhost", port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _own_store(limit) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment(monkeypatch, "localhost", taken.getsockname()[1])
        assert _own_store(limit) is None

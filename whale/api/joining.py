"""Joining the other ranks with settings that all of them share: recipes and environments are read on each rank by itself."""

from __future__ import annotations

from collections.abc import Callable

from whale.comm import World, connect, together
from whale.config import Config
from whale.errors import ConfigError, WhaleError


def join(resolve: Callable[[], Config]) -> tuple[World, Config]:
    """Joins the world with the settings that it finds on this rank.

    Args:
        resolve: finds them; where that fails on one rank alone, it fails on all.

    Raises:
        WhaleError: what `resolve` raised, here or elsewhere.
        ConfigError: ranks have unlike settings.
    """
    fault: WhaleError | None = None
    try:
        settings = resolve()
    except WhaleError as error:
        settings, fault = Config(), error
    world = connect(settings.communication.timeout_seconds)

    def found() -> Config:
        if fault is not None:
            raise fault
        return settings

    together(world, found)
    compare_settings(settings, world)
    return world, settings


OF_THE_FIRST = ("trace.directory",)
"""What rank 0 alone reads: hosts may write a path otherwise."""


def compare_settings(settings: Config, world: World) -> None:
    """Raises, on all ranks, a ConfigError where ranks have unlike settings."""
    own_values = {name: str(value) for name, value in settings.items() if name not in OF_THE_FIRST}
    everyones = world.gather_objects(own_values)  # lines, which blocks know, do not travel
    first = everyones[0]
    assert isinstance(first, dict)
    for rank, own in enumerate(everyones):
        assert isinstance(own, dict)
        odd = [name for name in {**first, **own} if first.get(name) != own.get(name)]
        if odd:
            listing = "; ".join(f"{name}: {first.get(name)} on rank 0, {own.get(name)} on rank {rank}" for name in odd)
            raise ConfigError(
                f"every rank has the same settings ({listing})",
                hint="each rank reads its own environment (WHALE_...), recipe and arguments: start all of them with the same ones",
            )

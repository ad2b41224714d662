"""Optimizers that treat every element alone: only they may step a part of a parameter as if it were the whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from whale.errors import ConfigError
from whale.runtime.state.joint import divided, members_of

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def check_elementwise(optimizer: torch.optim.Optimizer | None, shard: Sequence[str], by_keepers: Collection[str] = ()) -> None:
    """Refuses an optimizer that may mix the elements of a parameter, where parameters are cut.

    Args:
        optimizer: of this rank.
        shard: names of the parameters of which it has only a part.
        by_keepers: those of them that the plan cuts among those who keep shared-out state, and not among the devices of a stage.

    Raises:
        ConfigError: it is none of torch's elementwise optimizers.
    """
    members = members_of(optimizer)
    for pattern, names in divided(shard, members).items() if members else ():
        kind = type(members[pattern])
        if names and kind not in ELEMENTWISE:
            listing = ", ".join(each.__name__ for each in ELEMENTWISE)
            whole = f"replicate what {kind.__name__} steps"
            if set(names) <= set(by_keepers):
                whole = "set memory.zero: 0: ranks then step whole parameters (memory.offload: optimizer has their state on hosts)"
            raise ConfigError(
                f"a cut parameter needs an elementwise optimizer ({kind.__name__} steps {names[0]}, of which this rank has a part)",
                hint=f"use one of {listing}; or {whole}",
            )

"""Recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from whale.axes.operators.entry import Family, Operator, Shape, Template
from whale.axes.outcome import Misfit, Reading
from whale.ir.graph import Op, Ref


def recurrent(num_states: int) -> Template:
    """LSTM, GRU and plain recurrent layers: the batch is kept, everything else is whole."""

    def rule(op: Op, reading: Reading) -> str:
        if not isinstance(op.args[1 if num_states == 1 else 2], tuple | Ref):
            raise Misfit("its arguments are unknown")
        batch_first = op.args[-1] is True
        tensors = _tensor_ranks(op, reading)
        states = ["layers! b hidden!", "layers! b cell!"][:num_states]
        steps = "b steps! in!" if batch_first else "steps! b in!"
        made = "b steps! out!" if batch_first else "steps! b out!"
        operands = [f"input[{steps}]", *(f"state{i}[{state}]" for i, state in enumerate(states))]
        for index, rank in enumerate(tensors[1 + num_states :]):
            operands.append(f"weight{index}[{' '.join(f'_p{index}_{place}!' for place in range(rank))}]")
        return f"{' '.join(operands)} -> [{made}] {' '.join(f'[{state}]' for state in states)}"

    return rule


def recurrent_cell(num_states: int) -> Template:
    """One step of the same: the batch is kept; a gate reads all of the state, so the rest is whole."""

    def rule(op: Op, reading: Reading) -> str:
        states = ["b hidden!", "b cell!"][:num_states]
        ranks = _tensor_ranks(op, reading)[1 + num_states :]
        weights = [f"weight{index}[{' '.join(f'_p{index}_{place}!' for place in range(rank))}]" for index, rank in enumerate(ranks)]
        operands = ["input[b in!]", *(f"state{index}[{state}]" for index, state in enumerate(states)), *weights]
        return f"{' '.join(operands)} -> {' '.join(f'[{state}]' for state in states)}"

    return rule


def _tensor_ranks(op: Op, reading: Reading) -> list[int]:
    ranks = []
    for argument_ in op.args:
        for item in argument_ if isinstance(argument_, tuple) else (argument_,):
            dims = reading.tensor(item)
            if dims is not None:
                ranks.append(len(dims))
    return ranks


def matrices_by_steps(args: Sequence[Any], results: Sequence[Shape]) -> int:
    """Every matrix, all of which stand behind input and state, meets every step of every sequence."""
    weights = (weight for item in args[2:] for weight in (item if isinstance(item, list) else [item]))
    steps: int = prod(args[0][:-1])
    return 2 * steps * sum(prod(shape) for shape in weights if isinstance(shape, tuple) and len(shape) == 2)


_INPUT_AND_WEIGHTS = (0, 2, 3, 4, 5)

RECURRENCES: Family = {
    "lstm.input": Operator(recurrent(2), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "gru.input rnn_tanh.input rnn_relu.input": Operator(recurrent(1), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "lstm_cell": Operator(recurrent_cell(2), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
    "gru_cell rnn_tanh_cell rnn_relu_cell": Operator(recurrent_cell(1), flops=matrices_by_steps, factors=_INPUT_AND_WEIGHTS),
}

"""From the user's model, batch and loss to the ModelGraph and its Program.

trace      torch.export of model and loss, without running them
flatten    one graph: ties joined, inner regions inlined, one ``num_rows``
writes     to parameters are refused, to the batch go to a copy
split      the loss becomes terms of (sum, weight)
clean      dead code, needless detaches and slices are removed, and masks that no batch decides
describe   nodes become ops, without torch
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from whale.capture.batch import BatchDims, BatchStructure
from whale.capture.comparing import Difference, difference, write_rows
from whale.capture.exporting.near_values import NearValues
from whale.capture.exporting.refusals import check_model
from whale.capture.exporting.side_effects import AttributeAccess, KeptTensor, Left, SideEffects, warning_of
from whale.capture.exporting.trace import Traced, trace
from whale.capture.exporting.wrapper import Loss, Mode, check_loss
from whale.capture.flat.aliasing import ancestors, memory_roots, written_arguments
from whale.capture.flat.autocast import Autocast, lift_casts
from whale.capture.flat.flatten import Flat, flatten
from whale.capture.flat.masks import settle_masks
from whale.capture.flat.ops import describe, with_scopes
from whale.capture.flat.passes import drop_needless_detaches, drop_whole_slices, remove_dead_code, settle_writes
from whale.capture.flat.sizes import TiedTensors, check_memory, holdings, lender, mark_factors
from whale.capture.flat.whole_outputs import cut_whole_outputs
from whale.capture.loss.terms import TermNodes, split_loss
from whale.capture.program import CapturedProgram, WholeOutputs
from whale.capture.scopes import default_scope, renumber
from whale.capture.source import line_of
from whale.capture.tagging import tag_of
from whale.errors import CaptureError, WhaleError, first_few, raise_faults
from whale.ir.graph import LossTerm, ModelGraph, Op, Parameter
from whale.ir.precision import HALF, Precision
from whale.ir.scope import Scope, SourceLine
from whale.ir.writes import with_reached_gradients, written_buffers
from whale.progress import without_collecting


@without_collecting()
def capture(
    model: nn.Module,
    batch: object,
    loss: Loss | None = None,
    *,
    mode: Mode = "train",
    static: bool = False,
    batch_dims: BatchDims | None = None,
    device: str | None = None,
    precision: Precision | None = None,
    read_as: Mapping[str, str] | None = None,
) -> tuple[ModelGraph, CapturedProgram]:
    """Captures a model and its loss as one graph, for any number of rows where its code allows that.

    Nothing is computed and the model is not changed. A model on the meta device is captured as on the CPU.

    Args:
        model: an ordinary module.
        batch: an example, or the structure of one. A mapping goes to the model as the keyword arguments that forward takes, a tuple or
            list by position, a tensor alone. What forward does not take is for the loss.
        loss: ``loss(output, batch)`` returns a scalar or a pair (sum, weight); None takes the output's own ``loss``.
        mode: ``train`` and ``eval`` return the loss, ``predict`` the model's output, ``eval_predict`` both. If the model computes its own
            loss and no other is given, the output has it as terms.
        static: capture for the example's number of rows alone (which may then be 1).
        batch_dims: per tensor, by key, 0 if it has rows, else None. Other tensors have rows if their dimension 0 has the most common size.
        device: device type it will run on (``cpu``, ``cuda``): `torch.autocast` for another type does nothing. None takes the type that the
            autocasts in the model name.
        precision: the dtype that `torch.autocast` on that device type (None: a GPU) would cast to, and the parameters left out; None keeps
            the dtypes of the model.
        read_as: for a later capture of a model, the dtypes in which the first reads parameters that are cast once per step.

    Raises:
        CaptureError: something in the model would be lost, or depends on values in tensors; torch's version was not tested; or a pattern
            of the precision matches no parameter.
        BatchError: the example is no batch, or lacks what forward requires.
    """
    check_version(torch.__version__)
    structure = batch if isinstance(batch, BatchStructure) else BatchStructure.of(batch, 1 if static else 2, batch_dims)
    check_model(model)
    check_loss(loss)
    near = NearValues(model, loss)
    effects, lines = SideEffects(near), tuple[str, ...]()
    if read_as is not None and precision is not None and precision.by_device:
        read_as = {name: precision.dtype if dtype == HALF else dtype for name, dtype in read_as.items()}
    kind = _Kind(device, None if precision is None else Autocast.of(precision, device or "cuda"), read_as)
    captured = partial(_captured, model, loss, structure, mode, static, kind, near)
    graph, program = captured(effects)
    if effects.drawn:
        lines = _lines_of_draws(captured, near, (graph, program))
    texts = effects.warnings(lines)
    if effects.left:
        texts += _warnings_of_left(captured, near, effects.left, (graph, program))
    if effects.beside:
        texts += _warnings_beside_tables(captured, near, effects.beside)
    return replace(graph, warnings=(*graph.warnings, *texts)), replace(program, warnings=(*program.warnings, *texts))


@dataclass(frozen=True)
class _Kind:
    """The device type of a capture (None: any), the autocast around all of it, and how earlier captures read parameters."""

    device: str | None
    autocast: Autocast | None
    read_as: Mapping[str, str] | None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Enters the autocast, so that reads of dtypes see it; also for the CPU, where meta models are captured."""
        with ExitStack() as stack:
            if self.autocast is not None:
                for kind in {"cpu", self.autocast.kind}:
                    stack.enter_context(replace(self.autocast, kind=kind).in_force())
            yield


def _captured(
    model: nn.Module,
    loss: Loss | None,
    structure: BatchStructure,
    mode: Mode,
    static: bool,
    kind: _Kind,
    near: NearValues,
    effects: SideEffects,
) -> tuple[ModelGraph, CapturedProgram]:
    default, access = default_scope(), AttributeAccess(near)
    precision = None if kind.autocast is None else kind.autocast.precision
    with torch.random.fork_rng(devices=[]), kind.in_force(), ExitStack() as stack:
        limits = set[str]()
        if precision is not None and precision.by_device:
            from whale.capture.half_types import limits_noted  # few models need it

            limits = stack.enter_context(limits_noted(precision.dtype))
        first, double = trace(model, loss, structure, mode, static, access, effects)
    graph, program = _build(model, structure, first, double, mode, default, kind, effects)
    if precision is not None and precision.by_device:
        from whale.capture.half_types import for_any_device

        graph = for_any_device(graph, precision.dtype, limits)
    return graph, replace(program, reads=access.read)


def _lines_of_draws(
    captured: Callable[[SideEffects], tuple[ModelGraph, CapturedProgram]], near: NearValues, first: tuple[ModelGraph, CapturedProgram]
) -> tuple[str, ...]:
    """The line where other random numbers of Python and NumPy give another graph."""
    try:
        found = difference(first, captured(SideEffects(near, seed=1)))
    except WhaleError:  # with other draws it cannot be captured: there is no line to name
        return ()
    return () if found is None else (f"{found.where}: {found.what}",)


def _build(
    model: nn.Module,
    structure: BatchStructure,
    first: Traced,
    double: Traced | None,
    mode: Mode,
    default: Scope | None,
    kind: _Kind,
    effects: SideEffects,
) -> tuple[ModelGraph, CapturedProgram]:
    held = holdings(model)
    _check_patterns(held, kind.autocast)
    flat = flatten(first, structure, held, kind.device, kind.autocast)
    second = None if double is None else flatten(double, structure, held, kind.device, kind.autocast)
    changing = set[str]()
    for each in (flat, second):
        if each is not None:
            settle_writes(each)
            changing |= _check_kept(each, first.found.kept, held)
    effects.left, effects.beside = _may_be_read(effects, changing)
    knows_rows = first.dynamic or (second is not None and write_rows(flat, second))
    if not first.dynamic:
        mark_factors(flat.graph, None if second is None else second.graph, first.rows)
    terms: list[TermNodes] = []
    num_of_loss = first.found.num_of_loss
    if num_of_loss:
        terms = _split(flat, num_of_loss, first.found.metrics, knows_rows)
        if second is not None:
            _split(second, num_of_loss, first.found.metrics, knows_rows)
            mark_factors(flat.graph, second.graph, first.rows)
    outputs = _as_ops(flat, flat.results[num_of_loss + len(first.found.metrics) :])
    returned = [node for term in terms for node in (term.sum, term.weight) if node is not None]
    flat.graph.output((*returned, *outputs))
    drop_needless_detaches(flat.graph)
    drop_whole_slices(flat.graph)
    if first.dynamic:  # else a length may be the number of rows
        settle_masks(flat.graph, flat.sizes)
    kept = frozenset(name for name, kind in flat.kinds.items() if kind in ("buffer", "parameter"))
    remove_dead_code(flat.graph, kept)
    read_as = _lift_casts(flat, held, kind.read_as)
    settle = partial(_described, flat, held, model, first, mode, default, terms, read_as)
    graph, whole = settle(), None
    if graph.outputs:
        whole = cut_whole_outputs(flat, graph, len(returned))
    if whole is not None:
        remove_dead_code(flat.graph, kept)
        graph = settle()
    graph = with_reached_gradients(graph) if mode == "train" else graph
    changed = {each.name for each in held.parameters if each.trainable} | written_buffers(graph).keys()
    check_memory(held, changed)
    _check_constants(flat, held, changed)
    _check_trains(graph)
    return _with_sparse(graph, flat.graph, _sparse_tables(model, held)), _program(flat, structure, held, first, whole)


def _described(
    flat: Flat,
    held: TiedTensors,
    model: nn.Module,
    first: Traced,
    mode: Mode,
    default: Scope | None,
    terms: list[TermNodes],
    read_as: Mapping[str, str],
) -> ModelGraph:
    """The graph as a value."""
    ops = describe(flat, model, default)
    ops, parameters = _with_stable_scopes(ops, with_scopes(held.parameters, ops, model), model, first.entered)
    num_returned = sum(1 if term.weight is None else 2 for term in terms)
    return ModelGraph(
        ops=ops,
        parameters=tuple(replace(each, read_as=read_as.get(each.name)) for each in parameters),
        num_rows=first.rows,
        loss=_loss_terms(flat, terms, ops),
        outputs=tuple(node.name for node in _returned(flat.graph)[num_returned:]),
        mode=mode,
        dynamic=first.dynamic,
        warnings=(*_warnings(first), *flat.warnings),
    )


def _check_patterns(held: TiedTensors, autocast: Autocast | None) -> None:
    names = [each.name for each in held.parameters if each.kind == "parameter"]
    precision = None if autocast is None else autocast.precision
    if precision is not None and (idle := precision.idle_patterns(names)):
        raise CaptureError(
            f"no parameters are left for {' and '.join(map(repr, idle))} of precision.dtype",
            hint=f"the parameters are {first_few(names)}; each goes to the first pattern that matches it",
        )


def _check_kept(flat: Flat, kept: Sequence[KeptTensor], held: TiedTensors) -> set[str]:
    """Takes what `forward` makes for its next call off the results; refuses what is made of what changes from step to step.

    Returns:
        Of what the next call may not read, the names of that.
    """
    found = set[str]()
    if not kept:
        return found
    flat.results, made = flat.results[: -len(kept)], flat.results[-len(kept) :]
    roots = memory_roots(flat.graph)
    replaced = {held.canonical.get(each.name) for each in kept if not each.is_attribute} - {None}
    faults: list[WhaleError] = []
    for tensor, node in zip(kept, made, strict=True):
        sources = ancestors(node) if isinstance(node, fx.Node) else set()
        memory = {roots[each] for each in sources}
        changing = [each for each in sources if each is not flat.rows and _changes(flat, each, replaced)]
        for each in flat.graph.nodes:
            written = {roots[base] for base in written_arguments(each)} & memory
            changing += [each] if any(each not in sources or root.op == "placeholder" for root in written) else []
        if tensor.left is not None:
            found |= {tensor.name} if changing else set()
        elif changing or tensor.is_written:
            how = f"is made of %{changing[0].name}" if changing else "is written to after that"
            if tensor.is_attribute:
                fault = f"forward looks for {tensor.name} of its last call, makes it where it is missing"
                fault += f", and each step would be a first one: it {how}"
                hint = "keep it in a buffer, registered in __init__ with its first value, and write into that: self.ema.mul_(0.9).add_(...)"
            else:
                fault = f"forward registers buffer {tensor.name}, which {how}, and which would be made anew in each step"
                hint = "register it in __init__, with its first value; what others are to read goes into a plain attribute"
            faults.append(CaptureError(fault, where=tensor.where, hint=hint))
    raise_faults(faults)
    return found


def _may_be_read(effects: SideEffects, changing: Collection[str]) -> tuple[tuple[Left, ...], tuple[Left, ...]]:
    """What the next call is to begin with: tensors that change from step to step, and plain values of modules that keep no tables; and
    tables, with the plain values of their modules, which may belong to them.
    """
    constant = [each for each in (*effects.tables, *effects.left) if each.tensors and each.name not in changing]
    with_tables = {each.owner for each in constant}
    plain = [each for each in effects.left if not each.tensors]
    beside = [each for each in plain if each.owner in with_tables]
    return (
        tuple(each for each in effects.left if each.name in changing or (not each.tensors and each.owner not in with_tables)),
        (*constant, *beside) if beside else (),
    )


def _warnings_of_left(
    captured: Callable[[SideEffects], tuple[ModelGraph, CapturedProgram]],
    near: NearValues,
    left: tuple[Left, ...],
    first: tuple[ModelGraph, CapturedProgram],
) -> tuple[str, ...]:
    """Captures the next call, which begins with what the first has left. Raises CaptureError where it computes something else."""
    effects = SideEffects(near, carried=left)
    _check_next_call(captured, effects, left, first)
    return (warning_of(effects.moved),) if effects.moved else ()


def _warnings_beside_tables(
    captured: Callable[[SideEffects], tuple[ModelGraph, CapturedProgram]], near: NearValues, beside: tuple[Left, ...]
) -> tuple[str, ...]:
    """Captures the two next calls, which find the tables made, if the plain values beside these have changed between them.

    Raises CaptureError where they compute other things.
    """
    second = SideEffects(near, carried=beside)
    try:
        now = captured(second)
    except WhaleError:  # its tables are not those of the first: their values are unknown
        return ()
    if not second.moved:
        return ()
    _check_next_call(captured, SideEffects(near, carried=second.carried_on), [each for each in beside if each.name in second.moved], now)
    return (warning_of(second.moved),)


def _check_next_call(
    captured: Callable[[SideEffects], tuple[ModelGraph, CapturedProgram]],
    effects: SideEffects,
    left: Iterable[Left],
    before: tuple[ModelGraph, CapturedProgram],
) -> None:
    try:
        found = difference(before, captured(effects))
    except WhaleError as error:
        found = Difference(error.message, cast(SourceLine | None, error.where))
    if found is not None:
        names = first_few(list(dict.fromkeys(each.name for each in left)))
        raise CaptureError(
            f"forward leaves {names} for its next call, which computes something else then: {found.what}; each step would be a first one",
            where=found.where,
            hint="keep what the next step needs in a buffer, registered in __init__ with its first value",
        )


def _changes(flat: Flat, node: fx.Node, replaced: Collection[str | None]) -> bool:
    """Whether a node has another value in the next step: a part of the batch, a trained parameter, a replaced buffer, a random number."""
    kind = flat.kinds.get(node.name)
    if kind == "buffer":
        return flat.sources[node.name] in replaced
    is_trained = kind == "parameter" and bool(node.meta["val"].requires_grad)
    return kind == "input" or is_trained or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _lift_casts(flat: Flat, held: TiedTensors, others: Mapping[str, str] | None) -> dict[str, str]:
    trained = {each.name for each in held.parameters if each.kind == "parameter" and each.trainable}
    placeholders = ((node, flat.sources.get(node.name, "")) for node in flat.graph.find_nodes(op="placeholder"))
    return lift_casts(flat.graph, {node: name for node, name in placeholders if name in trained}, others)


def _check_constants(flat: Flat, held: TiedTensors, changed: Collection[str]) -> None:
    """Refuses a constant that shares memory with a parameter or buffer that changes: the engine trains a copy of those."""
    for node in flat.graph.find_nodes(op="placeholder"):
        tensor = flat.constants.get(node.name)
        name = None if tensor is None or isinstance(tensor, FakeTensor) else lender(held, tensor, changed)
        if name is not None and node.users:
            raise CaptureError(
                f"the model reads a tensor that shares memory with {name}, and is not {name} itself",
                where=line_of(next(iter(node.users))),
                hint=f"read {name} in forward, with .detach() where no gradient is to flow; or clone() what is to keep its first value",
            )


def _as_ops(flat: Flat, results: Sequence[Any]) -> list[Any]:
    """Adds an alias op for each placeholder among the results (a parameter, a part of the batch): only ops have a place in a plan."""
    found = list(results)
    for index, node in enumerate(found):
        if isinstance(node, fx.Node) and node.op == "placeholder":
            found[index] = flat.graph.call_function(torch.ops.aten.alias.default, (node,))
            found[index].meta["val"] = node.meta["val"]
    return found


def _split(flat: Flat, num_of_loss: int, metrics: Sequence[str], knows_rows: bool) -> list[TermNodes]:
    """The terms of the loss, the first `num_of_loss` results, and of the metrics after it.

    Without `knows_rows` a constant may be a multiple of the number of rows.
    """
    total, weight = (*flat.results[:num_of_loss], None)[:2]
    scalars = dict(zip(metrics, flat.results[num_of_loss:], strict=False))
    for name, node in {"the loss": total, **{f"metric {name!r}": node for name, node in scalars.items()}}.items():
        if not isinstance(node, fx.Node):
            raise CaptureError(f"{name} is a constant: it does not depend on the model or the batch")
    number = float(weight) if isinstance(weight, (int, float)) else None
    rows = flat.rows if knows_rows else None
    terms = split_loss(flat.graph, total, None if number is not None else weight, scalars, rows=rows, row_factors=flat.sizes.factors)
    if number is None:
        return terms
    own = [term for term in terms if not term.metric]
    return [*_over_constant(flat, own, total, number, knows_rows), *(term for term in terms if term.metric)]


def _over_constant(flat: Flat, terms: list[TermNodes], total: fx.Node, weight: float, knows_rows: bool) -> list[TermNodes]:
    """A weight that is a plain number is a constant factor, unless rows may be numbers too: then a multiple of them counts rows."""
    rows = flat.sizes.rows
    if weight == 0:
        raise CaptureError("the weight of the loss is the constant 0", where=line_of(total))
    if knows_rows or weight % rows or any(term.weight is not None for term in terms):
        return [replace(term, coefficient=term.coefficient / weight) for term in terms]
    count = flat.graph.call_function(operator.mul, (rows, int(weight) // rows))
    count.meta["val"] = int(weight)
    reason = f"captured for {rows} rows only, so the weight {weight:g} is taken for {int(weight) // rows} x the rows"
    return [TermNodes(1.0, total, count, total, reason)]


def _loss_terms(flat: Flat, terms: list[TermNodes], ops: tuple[Op, ...]) -> tuple[LossTerm, ...]:
    """The terms as values; nodes are read back from the output, since cleaning may have replaced them."""
    returned = iter(_returned(flat.graph))
    by_name = {op.name: op for op in ops}
    found = []
    for term in terms:
        total = next(returned)
        weight = None if term.weight is None else next(returned)
        known = weight is None or _from_inputs(flat.graph, weight, by_name)
        found.append(
            LossTerm(
                term.coefficient,
                total.name,
                None if weight is None else weight.name,
                known,
                line_of(term.where),
                term.offset,
                term.minimum,
                term.reason,
                term.metric,
            )
        )
    return tuple(found)


def _from_inputs(graph: fx.Graph, weight: fx.Node, ops: dict[str, Op]) -> bool:
    """Whether a weight can be computed from the batch alone, before the forward pass."""
    made_of = ancestors(weight)
    roots = memory_roots(graph)
    written = {roots[base] for node in graph.nodes if node not in made_of for base in written_arguments(node)}
    return not any(
        ops[node.name].kind in ("parameter", "buffer")
        or ops[node.name].requires_grad
        or "random" in ops[node.name].tags
        or roots[node] in written
        for node in made_of
    )


def _with_stable_scopes(
    ops: tuple[Op, ...], parameters: tuple[Parameter, ...], model: nn.Module, entered: tuple[Scope, ...]
) -> tuple[tuple[Op, ...], tuple[Parameter, ...]]:
    """Ops and parameters with scopes numbered in order of entry, equal in every process and every capture of the model."""
    paths = {op.scope for op in ops} | {each.scope for each in parameters} | {(scope,) for scope in entered}
    paths |= {tag_of(module) or () for module in model.modules()}
    stable = renumber(paths)
    return (
        tuple(replace(op, scope=stable[op.scope]) if op.scope else op for op in ops),
        tuple(replace(each, scope=stable[each.scope]) if each.scope else each for each in parameters),
    )


def _warnings(traced: Traced) -> tuple[str, ...]:
    found = []
    if not traced.dynamic:
        found.append("the model's code depends on the number of rows, so it is captured again for each other number of rows")
    return (*found, *_of_state(traced))


def _of_state(traced: Traced) -> tuple[str, ...]:
    """Warnings of state that a plain loop carries from call to call, and steps do not."""
    return (warning_of(traced.found.handed_on),) if traced.found.handed_on else ()


def _check_trains(graph: ModelGraph) -> None:
    if graph.mode == "train" and not any(graph.by_name[term.sum].requires_grad for term in graph.loss):
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient",
            where=graph.loss[0].where if graph.loss else None,
            hint="is the model frozen, or the loss detached or computed from integers?",
        )


def _sparse_tables(model: nn.Module, held: TiedTensors) -> Iterator[str]:
    """The tables of modules that look up sparsely, which a step may read that this capture does not."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield held.canonical[f"{name}.weight" if name else "weight"]


def _with_sparse(graph: ModelGraph, nodes: fx.Graph, tables: Iterable[str]) -> ModelGraph:
    """The graph with the number of lookups of each parameter that gets a sparse gradient: one that only such lookups read.

    Of those `tables` that nothing reads the number is unknown, and taken for one per row.
    """
    counts, faults, sparse = Counter[str](), list[WhaleError](), set[str]()
    for node in nodes.nodes if graph.mode == "train" else ():
        arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
        given = dict(zip((each.name for each in arguments), node.args, strict=False)) | node.kwargs
        word = next((name for name in ("sparse", "sparse_grad") if given.get(name) is True), None)
        if word is None or not (op := graph.by_name[node.name]).requires_grad:
            continue
        sparse.add(op.name)
        table = given.get("weight")
        read = list(graph.parameters_among([table.name])) if word == "sparse" and isinstance(table, fx.Node) else []
        for parameter in read:
            counts[parameter.name] += max(1, graph.by_name[given["indices"].name].outputs[0].num_elements)
        if not read:
            faults.append(
                CaptureError(
                    f"{op.module or op.target} has {word}=True, but its operand is not a parameter that an embedding looks up",
                    where=op.where,
                    hint=f"{word}=False, and an optimizer for dense gradients: torch.optim.AdamW, not SparseAdam",
                )
            )
    for op in graph.ops if counts else ():
        for parameter in graph.parameters_among(op.inputs) if op.name not in sparse else ():
            if parameter.name in counts:
                faults.append(
                    CaptureError(
                        f"the gradient of {parameter.name} cannot be sparse: besides lookups with sparse=True, {op.target} reads it",
                        where=op.where,
                        hint="sparse=False in the lookup, and an optimizer for dense gradients: torch.optim.AdamW, not SparseAdam",
                    )
                )
    raise_faults(faults)
    unread = set(tables if graph.mode == "train" else ()) - {each.name for each in graph.parameters_among(op.name for op in graph.ops)}
    counts.update({own.name: graph.num_rows for own in graph.parameters if own.name in unread and own.trainable})
    return replace(graph, parameters=tuple(replace(own, num_lookups=counts[own.name]) for own in graph.parameters)) if counts else graph


def _program(flat: Flat, structure: BatchStructure, held: TiedTensors, traced: Traced, whole: WholeOutputs | None) -> CapturedProgram:
    names = {node.name for node in flat.graph.find_nodes(op="placeholder")}.union(() if whole is None else whole.read)
    sources = {name: key for name, key in flat.sources.items() if name in names}
    constants = {name: tensor for name, tensor in flat.constants.items() if name in names}
    return CapturedProgram(
        flat.graph,
        {**held.tensors, **constants},
        structure,
        sources,
        traced.found.outputs,
        traced.found.own_loss,
        whole,
        (*_of_state(traced), *flat.warnings),
    )


def _returned(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")  # minor versions, ascending, that `make versions` passes with


def check_version(version: str) -> None:
    """Refuses versions of torch (such as "2.13.0+cpu") that are not tested."""
    if ".".join(version.split(".")[:2]) in TESTED:
        return
    raise CaptureError(
        f"torch {version} is not supported; tested versions are {', '.join(TESTED)}",
        hint=f"pip install 'torch=={TESTED[-1]}.*'",
    )

"""Checks in which forms parameters live: that each has a state, and one that the runtime can keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from whale.errors import PlanError, first_few
from whale.ir.graph import ModelGraph
from whale.ir.plan import Form, ParameterState, Plan

_KINDS = (("float64", "float32", "bfloat16", "float16"), ("complex128", "complex64"))
"""Types that one may be taken for another."""


def state_faults(plan: Plan, graph: ModelGraph) -> Iterator[PlanError]:
    """Everything that is wrong with the parameter states of a plan, or not there yet."""
    counts = Counter(name for state in plan.parameter_states for name in state.parameters)
    odd = [f"{own.name} has {counts[own.name]}" for own in graph.parameters if counts[own.name] != 1]
    odd += [f"{name} is none" for name in counts if name not in graph.parameter_by_name]
    if odd:
        yield PlanError(f"a plan has one state for each parameter and buffer of its model ({first_few(odd)})")
        return
    yield from _share_faults(plan)
    corrected = [term for term in graph.loss if term.weight is not None and not term.weight_from_inputs]
    if corrected and any(state.feeds_back for state in plan.parameter_states):
        yield PlanError(
            "what rounding of gradients loses can be fed back where a loss is divided by what the batch says alone (its weight depends on "
            "the parameters, so that gradients of two steps are of two scales until they are summed)",
            where=corrected[0].where,
            hint="leave out gradient.error_feedback, or take a weight that is computed from the batch",
        )
    for state in plan.parameter_states:
        named = graph.parameter_by_name
        trained = [name for name in state.parameters if named[name].kind == "parameter" and named[name].trainable]
        fixed = [name for name in state.parameters if name not in set(trained)]
        yield from _trained_faults(state, trained) if trained else ()
        yield from _fixed_faults(state, fixed) if fixed else ()
        yield from _form_faults(state, {named[name].read_as or named[name].spec.dtype for name in state.parameters})


def _trained_faults(state: ParameterState, trained: list[str]) -> Iterator[PlanError]:
    forms = dict(state.forms)
    if "gradient" not in forms or "optimizer" not in forms or state.num_optimizer_tensors < 0:
        yield PlanError(
            f"what is trained has a gradient, and a form that the optimizer steps ({first_few(trained)}: {', '.join(forms)}; "
            f"{state.num_optimizer_tensors} tensors)"
        )


def _fixed_faults(state: ParameterState, fixed: list[str]) -> Iterator[PlanError]:
    if len(state.forms) > 1 or state.num_optimizer_tensors or state.sum_dtype:
        yield PlanError(f"what is not trained has no gradient and no optimizer state ({first_few(fixed)}: {', '.join(dict(state.forms))})")


def _form_faults(state: ParameterState, dtypes: set[str]) -> Iterator[PlanError]:
    """Ops read a type that the graph says, on the device; what is summed and stepped may be of another."""
    named, own = first_few(list(state.parameters)), state.compute
    if dtypes != {own.dtype} or own not in (Form(own.dtype), Form(own.dtype, "owners")):
        yield PlanError(
            f"ops read parameters on the device, in the types of the graph ({named}, compute: {own}; the graph's: "
            f"{', '.join(sorted(dtypes))})"
        )
    if state.is_gathered and (state.optimizer is None or state.kept.sharding != "owners"):
        yield PlanError(
            f"what ops read is shared out among owners with what the optimizer steps ({named}, compute: {own}; kept: {state.kept})"
        )
    types = next((kind for kind in _KINDS if own.dtype in kind), (own.dtype,))
    for name, form in state.forms[1:]:
        if form.dtype not in types or form.sharding not in ("stage", "owners") or form.home not in ("device", "host"):
            yield PlanError(
                f"a form has a type like the parameter's ({', '.join(types)}), sharding stage or owners, home device or host "
                f"({named}, {name}: {form})"
            )
    if state.sum_dtype not in (None, *types):
        yield PlanError(f"gradients are summed in a type like the parameter's ({', '.join(types)}; {named}: {state.sum_dtype})")
    if state.feeds_back and state.sum_dtype is None:
        yield PlanError(
            f"what rounding of sums loses is fed back where there is such rounding ({named}: summed in the gradients' own type)",
            hint="plan again with gradient.sum_dtype, or without gradient.error_feedback",
        )
    if state.gradient is not None and state.gradient.home == "host":
        yield PlanError(
            f"gradients are made on the device ({named}, gradient: {state.gradient})", hint="the optimizer form may live on the host"
        )
    if state.gradient is not None and state.gradient.sharding == "owners" and state.kept.sharding != "owners":
        yield PlanError(
            "gradients are shared out among owners with what the optimizer steps "
            f"({named}, gradient: {state.gradient}; optimizer: {state.kept})"
        )


def _share_faults(plan: Plan) -> Iterator[PlanError]:
    """Weights of ranks by which state is shared out."""
    if plan.keeper_shares and (len(plan.keeper_shares) != len(plan.devices) or min(plan.keeper_shares) < 1):
        yield PlanError(
            f"every rank has a weight by which state is shared out ({len(plan.devices)} ranks, weights: {list(plan.keeper_shares)})"
        )

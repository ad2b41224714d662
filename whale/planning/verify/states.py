"""Checks in which forms parameters live: today all on the devices of their stages, in their own types."""

from __future__ import annotations

from collections.abc import Iterator

from whale.errors import PlanError
from whale.ir.plan import FIXED, TRAINED, Form, Plan


def state_faults(plan: Plan) -> Iterator[PlanError]:
    """Everything that is wrong with the parameter states of a plan, or not there yet."""
    classes = [state.parameters for state in plan.parameter_states]
    if sorted(classes) != sorted((TRAINED, FIXED)):
        yield PlanError(f"a plan has a state for {TRAINED} and for {FIXED} parameters (states: {', '.join(classes) or 'none'})")
    for state in plan.parameter_states:
        names = {name for name, _ in state.forms}
        if state.parameters == TRAINED and "gradient" not in names:
            yield PlanError(f"{TRAINED} parameters have a gradient (forms: {', '.join(sorted(names))})")
        if state.parameters == FIXED and names != {"compute"}:
            yield PlanError(f"{FIXED} parameters have no gradient and no optimizer state (forms: {', '.join(sorted(names))})")
        if (state.num_optimizer_tensors > 0) != ("optimizer" in names) or state.num_optimizer_tensors < 0:
            yield PlanError(
                f"an optimizer's tensors have a form where there are any ({state.parameters}: {state.num_optimizer_tensors} tensors, "
                f"forms: {', '.join(sorted(names))})"
            )
        for name, form in state.forms:
            if form != Form():
                yield PlanError(
                    f"parameters live as their stages hold them ({state.parameters}, {name}: {form}; there is: {Form()})",
                    hint="state that is sharded otherwise, of another type, or in host memory is not there yet",
                )

"""The law over parameter states: whatever owners keep, in whichever type and memory, the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, event, given, note
from hypothesis import strategies as st
from torch import nn

import whale
from tests import reference
from tests.captures import captured_once
from tests.distributed.split_training import cut_anew, plan_case, whole_gradients
from tests.distributed.test_unlike_replicas import CLIPPED, ONE, SPLIT, TWO, Blocks, unlike, with_order
from tests.distributed.training import (
    OPTIMIZERS,
    Case,
    captured_case,
    finished,
    largest_of,
    make_cluster,
    make_engine,
    norms_of,
    run_case,
    train_on,
    train_reference,
    trained,
)
from tests.distributed.world import RankFailure, World
from tests.examples import at_most, further
from tests.models import Block, Description, build, descriptions, make_batch
from whale.comm import Groups, Launched
from whale.errors import RuntimeFault
from whale.estimate import DeviceEstimate, estimate
from whale.ir.graph import ModelGraph
from whale.ir.plan import Form, Plan, Shard, Stage, Zero, brought_back, states_of
from whale.ir.serialization import from_json, to_json
from whale.planning import carry_plan, make_plan, retarget_plan
from whale.runtime.state.publishing import Publishing, RankBucket
from whale.sharding.keepers import keeper_groups

TOLERANCE = 1e-10

ASKED: tuple[tuple[tuple[str, object], ...], ...] = (
    (),
    (),
    (("memory.zero", "1"),),
    (("memory.zero", "1"), ("communication.defer_weights", False), ("communication.bucket_bytes", "200")),
    (("memory.zero", "2"), ("memory.offload", "optimizer"), ("communication.bucket_bytes", "200")),
    (("memory.zero", "3"), ("communication.bucket_bytes", "200")),
    (("memory.zero", {"*weight": "3", "*": "1"}), ("communication.bucket_bytes", "200")),
    (("memory.offload", "optimizer+parameters"), ("communication.bucket_bytes", "200")),
    (("memory.zero", "3"), ("memory.offload", "optimizer+parameters")),
    (("memory.zero", "0"), ("memory.offload", "activations"), ("recompute.policy", "blocks")),
)
"""Settings that say the state; where there are none, it is drawn."""


def with_state(
    plan: Plan,
    graph: ModelGraph,
    zero: Zero,
    home: str = "device",
    shares: tuple[int, ...] = (),
    back: Collection[str] = (),
    reads: Collection[str] = (),
    groups: tuple[int, ...] = (),
) -> Plan:
    """The plan with the optimizer's form (1) shared out, or the gradients' too (2), or what ops read (3), of frozen parameters too, of all
    or by their names, on the device or the host, but for parameters that are brought back from there; all in float64. ``weights``: on the
    host with what ops read, but for some. Each of the groups keeps a copy of what is shared out.
    """
    own = {parameter.name for parameter in graph.parameters if parameter.spec.dtype == "float64"}
    others = states_of(each for each in graph.parameters if each.name not in own)
    real = (each for each in graph.parameters if each.name in own)
    form, homes = Form("float64"), {"host": ("optimizer",), "weights": ("optimizer", "compute")}
    states = states_of(real, gradient=form, optimizer=form, zero=zero, on_host=homes.get(home, ()))
    states = brought_back(brought_back(states, reads, compute_only=True), back)
    plan = replace(plan, parameter_states=(*states, *others), keeper_shares=shares, keeper_groups=groups)
    return from_json(Plan, to_json(plan))


def come_late() -> AbstractContextManager[object]:
    """Inside of it weights that others keep come when they are waited for, and no sooner; what is written to them before is lost."""
    give = RankBucket.give

    def give_late(self: RankBucket, flat: torch.Tensor, groups: Groups) -> list[Launched | None]:
        there = flat.clone()
        works = give(self, there, groups)
        if works[-1] is None:  # there is nothing to wait for
            flat.copy_(there)
        return [*works[:-1], works[-1] and replace(works[-1], finish=lambda: flat.copy_(there))]

    return mock.patch.object(RankBucket, "give", give_late)


def train(rank: int, size: int, case: Case, plans: tuple[Plan, Plan], folder: str, expected: Mapping[str, torch.Tensor]) -> reference.Run:
    """Trains a case half under one plan, then under another: after a checkpoint where there is a folder, else by replanning."""
    with come_late():
        return train_by_both(case, plans, folder, expected)


def train_by_both(case: Case, plans: tuple[Plan, Plan], folder: str, expected: Mapping[str, torch.Tensor]) -> reference.Run:
    engine, batches = make_engine(case, plans[0]), case.batches
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for number, batch in enumerate(batches):
        if number == len(batches) // 2 and folder:
            engine.save(Path(folder) / "checkpoint")
            engine.close()
            engine = make_engine(case, plans[1])
            engine.load(Path(folder) / "checkpoint")
        elif number == len(batches) // 2:
            engine.replan(plans[1])
        losses.append(train_on(engine, case, number, batch))
        norms += norms_of(engine, case, number)
        if number == 0:
            gradients = whole_gradients(engine, expected)
    run = finished(engine, case, reference.Run(losses, gradients, norms=tuple(norms)))
    engine.close()
    return run


def check(world: World, case: Case, plans: tuple[Plan, Plan], *, saves: bool) -> None:
    expected = train_reference(case)
    assume(max(map(abs, expected.losses)) < 1e3)  # what diverges in so many steps says nothing
    check_equal(world, case, plans, expected, saves=saves)


def check_equal(world: World, case: Case, plans: tuple[Plan, Plan], expected: reference.Run, *, saves: bool) -> None:
    with TemporaryDirectory() as folder:
        runs = run_case(world, train, case, plans, folder if saves else "", expected.gradients)
    error, where = largest_of(runs, expected)
    assert error < TOLERANCE, where


def away(plan: Plan) -> Plan:
    """The plan with what stages keep for their backward passes on the host."""

    def of(stage: Stage) -> Stage:
        return replace(stage, program=tuple(replace(segment, offload=True) for segment in stage.program))

    return replace(plan, replicas=tuple(replace(each, stages=tuple(map(of, each.stages))) for each in plan.replicas))


@st.composite
def states(draw: st.DrawFn, plan: Plan, graph: ModelGraph) -> Plan:
    """The plan with a state: uneven keepers, on devices, on hosts or some here and some there; perhaps with activations on hosts, or
    with a copy in each of several groups of ranks.
    """
    shares = draw(st.lists(st.integers(1, 9), min_size=len(plan.devices), max_size=len(plan.devices)))
    home = draw(st.sampled_from(("device", "device", "host", "weights", "both")))
    zero: Zero = draw(st.integers(0, 3))
    names = [each.name for each in graph.parameters if each.kind == "parameter"]  # frozen ones too
    some = st.sets(st.sampled_from(names)) if home == "both" and names else st.just(frozenset[str]())
    back, reads = draw(some), draw(some)
    if names and draw(st.booleans()):
        zero = (*draw(st.dictionaries(st.sampled_from(names), st.integers(0, 3))).items(), ("*", zero))
    groups = keeper_groups(plan, draw(st.lists(st.sampled_from("abc"), min_size=len(plan.devices), max_size=len(plan.devices))))
    waits, frozen = draw(st.booleans()), any(each.kind == "parameter" and not each.trainable for each in graph.parameters)
    told = f"{zero if isinstance(zero, int) else 'by name'}{', some frozen' if frozen else ''}"
    event(f"zero {told}, home {home}{', activations too' if waits else ''}{', in groups' if groups else ''}")
    return with_state(
        away(plan) if waits else plan,
        graph,
        zero,
        home.replace("both", "weights"),
        tuple(shares) if draw(st.booleans()) else (),
        back,
        reads,
        groups,
    )


@st.composite
def blocks(draw: st.DrawFn, num_ranks: int) -> Blocks:
    """Replicas that take so many ranks."""
    found, left = [], num_ranks
    while left:
        kind = draw(st.sampled_from([own for own in ((1, 1), (1, 1), (1, 2), (2, 1), (3, 1), (2, 2)) if own[0] * own[1] <= left]))
        found.append({"num_stages": kind[0], "split": kind[1], "num_micro_batch": draw(st.integers(1, 3))})
        left -= kind[0] * kind[1]
    return tuple(found)


@at_most(25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_law(world: World, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    description = replace(data.draw(descriptions()), placement="none", copies=None)
    options: dict[str, Any] = {
        "optimizer": data.draw(st.sampled_from(("sgd", "adam"))),
        "seed": data.draw(st.integers(0, 99)),
        "num_accumulated": data.draw(st.integers(1, 2)),
        "decay": data.draw(st.sampled_from((None, 0.5))),
    }
    rows, config = tuple(data.draw(st.lists(st.integers(14, 18), min_size=4, max_size=4))), CLIPPED if data.draw(st.booleans()) else ()
    plans = []
    for _ in range(2):
        asked = data.draw(st.sampled_from(ASKED))
        own: dict[str, Any] = {"config": (*config, *asked), "evaluates": data.draw(st.booleans())}
        case = unlike(*data.draw(blocks(num_ranks)), rows=rows, **own, **options)
        case = replace(case, description=description)
        try:
            plan, graph = world.prepare(plan_case, case)
        except (whale.PlanError, whale.AnnotationError) as error:  # too few places to cut at, or nothing to split
            note(str(error))
            assume(False)
            raise
        plan = cut_anew(with_order(plan, data.draw), graph, case)
        plans.append(plan if asked else data.draw(states(plan, graph)))
        note(f"{plans[-1]}\n{plans[-1].parameter_states}\n{plans[-1].keeper_shares}")
    note(f"{case!r}")
    check(world, case, (plans[0], plans[1]), saves=data.draw(st.booleans()))


def loss_on_parts(world: World) -> tuple[Case, Plan, ModelGraph]:
    """A drawn case of the law: the last stage trains the loss alone, on parts of what a convolution of the first one makes whole.

    The table is shared, so other captures run head and loss on the first stage.
    """
    blocks = (Block("convolution"), Block("convolution", repeats=2))
    case = unlike({"num_stages": 2, "split": 2, "num_micro_batch": 2}, evaluates=True)
    case = replace(case, description=Description(tokens=True, blocks=blocks, extra_at=1, tied=True, loss="mse"))
    plan, graph = world.prepare(plan_case, case)
    first, last = plan.replicas[0].stages
    last = replace(last, shards=(Shard("values:1", (1, 2)),))
    return case, replace(plan, replicas=(replace(plan.replicas[0], stages=(first, last)),)), graph


def test_a_stage_that_other_modes_leave_without_ops(world: World) -> None:
    case, plan, graph = loss_on_parts(world)
    for mode in ("eval", "predict"):
        other, _ = captured_case(case).capture(mode)
        assert [bool(stage.ops) for stage in retarget_plan(plan, graph, other).replicas[0].stages] == [True, False]
    check_equal(world, case, (plan, with_state(plan, graph, 1)), train_reference(case), saves=False)


def other_lengths(case: Case) -> list[Any]:
    """Batches of which some are too short to be cut."""
    return [make_batch(replace(case.description, sequence=length), 14, number) for number, length in enumerate((3, 1, 4, 1))]


def train_on_lengths(rank: int, size: int, case: Case, plan: Plan) -> tuple[list[float], list[float]]:
    engine = make_engine(case, plan)
    losses = [float(engine.step(batch)) for batch in other_lengths(case)]
    evaluations = [float(engine.evaluate(batch)) for batch in other_lengths(case)]
    engine.close()
    return losses, evaluations


def test_a_stage_that_short_batches_leave_without_ops(world: World) -> None:
    case, plan, graph = loss_on_parts(world)
    short, _ = captured_case(case).capture("train", other_lengths(case)[1])
    assert [bool(stage.ops) for stage in carry_plan(plan, graph, short).replicas[0].stages] == [True, False]
    model, _, loss = build(case.description, case.seed)
    expected = reference.train(model, loss, other_lengths(case), OPTIMIZERS[case.optimizer]).losses
    evaluations = [reference.evaluate(model, loss, batch)[0] for batch in other_lengths(case)]
    for losses, evaluated in run_case(world, train_on_lengths, case, with_state(plan, graph, 1)):
        assert losses == pytest.approx(expected, abs=TOLERANCE)
        assert evaluated == pytest.approx(evaluations, abs=TOLERANCE)


def held_bytes(engine: whale.Engine) -> tuple[str, float, float, float, float]:
    """The device of a rank, and after a step the bytes of what ops read, of gradients with what their rounding has lost, of what the
    optimizer keeps, and of what lives on the host.
    """
    state, (sync,) = engine.state, engine.runtime._syncs.values()
    assert state.optimizer is not None
    buckets = [] if sync is None else sync._buckets
    parts = {} if engine.runtime._weights is None else engine.runtime._weights.parts
    tensors = [(name, own) for name, own in (*state.tensors.items(), *parts.items()) if own.untyped_storage().nbytes()]
    reads = {(own := each.untyped_storage())._cdata: (own.nbytes(), engine.plan.state_of(name).compute.home) for name, each in tensors}
    others = [(name, own) for name, own in state.kept.items() if own.untyped_storage()._cdata not in reads]
    entries = ((name, each) for name, own in state.kept.items() for each in state.optimizer.state[own].values())
    others += [(name, each) for name, each in entries if each.dim() > 0]
    homes = [(own.nbytes, engine.plan.state_of(name).kept.home) for name, own in others]
    read, kept = (sum(num_bytes for num_bytes, home in own if home == "device") for own in (reads.values(), homes))
    on_host = sum(num_bytes for num_bytes, home in (*reads.values(), *homes) if home == "host")
    flats = [own for bucket in buckets for own in (bucket.flat, bucket.lost) if own is not None]
    bucketed = {id(parameter) for bucket in buckets if bucket.flat is not None for parameter in bucket.parameters}
    there = {name for name in state.kept if engine.plan.state_of(name).kept.home == "host"}
    on_host += sum(own.grad.nbytes for name, own in state.kept.items() if name in there and own.grad is not None)
    left = [name for name, held in state.parameters.items() if id(held) not in bucketed and name in state.kept]
    stays = {name for name in left if name not in there or engine.runtime.holdings.gradient_stays(name)}
    own = [state.kept[name].grad for name in left if name in stays]
    summed = sum(each.nbytes for each in [*flats, *own] if each is not None)
    assert engine.rank is not None
    return engine.plan.devices[engine.rank], read, summed, kept, on_host


def trained_bytes(rank: int, size: int, case: Case, plan: Plan) -> tuple[str, float, float, float, float]:
    """`held_bytes` after two steps."""
    engine = make_engine(case, plan)
    for batch in case.batches[:2]:
        engine.step(batch)
    found = held_bytes(engine)
    engine.close()
    return found


ZEROS: tuple[Zero, ...] = (0, 1, 2, 3, (("*0*", 0), ("*1*", 3), ("*weight", 2), ("*", 1)))


@pytest.mark.parametrize(
    ("zero", "home", "replicas", "frozen"),
    [
        *((zero, "device", (TWO, SPLIT), ()) for zero in ZEROS),
        *((zero, "weights", (ONE, ONE, ONE | {"num_micro_batch": 2}), ()) for zero in ZEROS),
        *further((zero, home, (ONE, ONE), ()) for zero in (0, 3) for home in ("device", "weights")),
        *((3, home, (TWO, SPLIT), (0, 1)) for home in ("device", "weights")),
    ],
)
def test_memory_is_the_plans_to_the_byte(world: World, zero: Zero, home: str, replicas: Blocks, frozen: tuple[int, ...]) -> None:
    case = with_frozen(unlike(*replicas, optimizer="adam"), *frozen)
    plan, graph = world.prepare(plan_case, case)
    plan = with_state(plan, graph, zero, home, shares=tuple(range(1, 1 + len(plan.devices))))
    expected = estimate(plan, graph, make_cluster(case.speeds))
    for device, read, summed, kept, on_host in run_case(world, trained_bytes, case, plan):
        assert_as_planned(expected.of(device), read, summed, kept, on_host)
        in_pieces = SPLIT in replicas  # gradients of which pieces are summed are beside these until then
        assert zero not in (0, 1) or in_pieces or summed == expected.of(device).peak.gradients, "they are accumulated where they are summed"


def with_frozen(case: Case, *numbers: int, **changes: Any) -> Case:
    """The case, with a model whose blocks of these numbers are not trained."""
    blocks = tuple(replace(each, frozen=each.frozen or number in numbers) for number, each in enumerate(case.description.blocks))
    return replace(case, description=replace(case.description, blocks=blocks, **changes))


@pytest.mark.parametrize("home", ["device", "weights"])
@pytest.mark.parametrize("again", ["none", "blocks"])
def test_frozen_weights_are_shared_out_and_gathered(world: World, home: str, again: str) -> None:
    """A head behind a frozen base, with frozen layers that gradients pass: backward passes do not gather the base."""
    case = unlike(ONE | {"num_micro_batch": 2}, TWO, config=(("recompute.policy", again),), optimizer="adam", evaluates=True)
    case = with_frozen(case, 0, 1, 4, tokens=False, tied=False)
    plan, graph = world.prepare(plan_case, case)
    plan = with_state(plan, graph, 3, home, shares=(3, 1, 2))
    frozen = [each for each in graph.parameters if each.kind == "parameter" and not each.trainable]
    assert {plan.state_of(each.name).compute.sharding for each in frozen} == {"owners"} and len(frozen) > 4
    check_equal(world, case, (plan, with_state(plan, graph, 1)), train_reference(case), saves=home == "device")


def assert_as_planned(device: DeviceEstimate, read: float, summed: float, kept: float, on_host: float) -> None:
    """Of what `held_bytes` gives: it is what the estimate says of the end of a step."""
    use, (_, left) = device.peak, device.memory[-1]
    assert (read, kept, on_host) == (use.weights, use.optimizer, device.on_host), device.name
    assert summed == left - read - kept, device.name


def publish_nothing(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    """A training whose keepers keep what they make to themselves."""
    with mock.patch.object(RankBucket, "give", lambda self, flat, groups: [None]):
        return trained(make_engine(case, plan), case)


def wait_for_nothing(rank: int, size: int, case: Case, plan: Plan) -> reference.Run:
    """A training whose ops do not wait for what is on its way."""
    engine = make_engine(case, plan)
    with come_late(), mock.patch.object(Publishing, "need", lambda self, numbers: None):
        return trained(engine, case)


@pytest.mark.parametrize("fault", [publish_nothing, wait_for_nothing])
def test_the_law_would_notice_weights_that_are_not_there(world: World, fault: Callable[..., reference.Run]) -> None:
    case = unlike(ONE, ONE)
    plan, graph = world.prepare(plan_case, case)
    with pytest.raises(RankFailure, match="weights differ between ranks"):
        run_case(world, fault, case, with_state(plan, graph, 1))


def single() -> tuple[nn.Module, torch.Tensor, Any]:
    """A model in float32, its batch and its loss."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), torch.randn(12, 6), first_three


def first_three(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, batch[:, :3])


def prepare_single() -> None:
    captured_once(single)


RATE, NUM_STEPS = 1e-9, 6


def train_single(rank: int, size: int, gradient: Form, optimizer: Form, folder: str) -> dict[str, torch.Tensor]:
    """Steps that float32 is too coarse for, half of them after a checkpoint; the weights as the optimizer has them."""
    made, cluster = captured_once(single), make_cluster((1.0,) * size)
    graph, _ = made.capture()
    plan = make_plan(graph, cluster, whale.Config({"planning.search": "off"}))
    states = states_of(graph.parameters, gradient=gradient, optimizer=optimizer)
    plan = replace(plan, parameter_states=states, keeper_shares=tuple(range(1, 1 + size)))
    rate = partial(torch.optim.SGD, lr=RATE, momentum=0.9)
    engine = whale.parallelize(made.model, loss=made.loss, batch=made.batch, cluster=cluster, optimizer=rate, plan=plan)
    for number in range(NUM_STEPS):
        if number == NUM_STEPS // 2:
            engine.save(Path(folder) / "checkpoint")
            engine.load(Path(folder) / "checkpoint")
        engine.step(made.batch)
    found = engine.state_dict()
    assert found is not None
    assert {own.dtype for own in engine.state.tensors.values()} == {torch.float32}
    for own in engine.parameters.values():
        with torch.no_grad():
            own.mul_(2)
    if engine.state.kept and optimizer.sharding == "owners":
        with pytest.raises(RuntimeFault, match=r"weights were written since the last step .*by engine.load_state_dict"):
            engine.step(made.batch)
    elif engine.state.kept:
        engine.step(made.batch)
        assert all((engine.state.tensors[name] / own - 2).abs().max() < 1e-3 for name, own in found.items())
    engine.close()
    return reference.copy_of(found)


@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("sharding", ["stage", "owners"])
@pytest.mark.parametrize("summed", ["float32", "float64"])
def test_a_master_weight_takes_steps_that_what_ops_read_is_too_coarse_for(
    world: World, tmp_path: Path, home: Any, sharding: Any, summed: str
) -> None:
    model, batch, loss = single()
    before = reference.copy_of({name: own.double() for name, own in model.named_parameters()})
    masters = {name: nn.Parameter(own.clone()) for name, own in before.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=RATE, momentum=0.9)
    for _ in range(NUM_STEPS):
        model.zero_grad()
        loss(model(batch), batch).backward()
        for name, own in model.named_parameters():
            assert own.grad is not None
            masters[name].grad = own.grad.double()
        optimizer.step()
    world.prepare(prepare_single)
    for found in world.run(train_single, Form(summed), Form("float64", sharding, home), str(tmp_path), num_ranks=2):
        for name, own in masters.items():
            moved, expected = found[name] - before[name], own.detach() - before[name]
            assert found[name].dtype == torch.float64 and expected.abs().max() > 0
            torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))

"""What recomputes: where segments may lie, what they leave in memory, and how many each device's memory demands."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.planning.graphs import ROWS, Graph, chain, cluster, device, scope
from tests.unit.planning.texts import plan_text
from whale.config import SCHEDULES, Config
from whale.errors import ConfigError, PlanError, WhaleError
from whale.estimate import StepEstimate, kept_names, kept_tensors, output_lines, size_line
from whale.estimate.memory.memory import activations_of, saved_lines
from whale.hardware import parse_cluster
from whale.ir.cluster import Cluster, Host, Link
from whale.ir.graph import ModelGraph, TensorSpec
from whale.ir.plan import Plan, Segment, program_of
from whale.ir.schedule import Kind
from whale.ir.serialization import from_json, to_json
from whale.planning import MemoryShortage, make_plan
from whale.planning.pipeline.recompute import read_policy
from whale.planning.pipeline.scheduling import shape_pipeline
from whale.planning.pipeline.segments import find_blocks, find_cores, find_ground, find_modules
from whale.planning.plan import plan_and_estimate
from whale.planning.verify import verify
from whale.planning.verify.refused import FULL, WORTH_KEEPING
from whale.schedules import count_recomputed, edge_pairs, most_held, training_schedule
from whale.search import decide
from whale.units import counted
from whale.workloads import GPT

TWO_STAGES = {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}


def calls(graph: ModelGraph) -> list[str]:
    return [op.name for op in graph.ops if op.kind == "call"]


def thick(num_blocks: int = 6) -> ModelGraph:
    """Blocks that are narrow at their ends and wide inside."""
    graph = Graph()
    value = graph.input("x", 8)
    for index in range(num_blocks):
        up = graph.call(
            f"up{index}", "aten.linear.default", value, graph.parameter(f"up{index}.w", 256, 8), width=256, flops=2 * ROWS * 8 * 256
        )
        wide = graph.call(f"wide{index}", "aten.gelu.default", up, width=256, tags=("pointwise",))
        value = graph.call(f"down{index}", "aten.linear.default", wide, graph.parameter(f"down{index}.w", 8, 256), flops=2 * ROWS * 8 * 256)
    graph.sum_loss(value)
    return graph.build()


def blocks_of(graph: ModelGraph, in_flight: int = 4) -> tuple[tuple[str, ...], ...]:
    return find_blocks(graph, output_lines(graph), calls(graph), kept_tensors(graph), in_flight, ROWS)


def test_blocks_are_cut_where_little_crosses() -> None:
    assert [block[0] for block in blocks_of(thick())] == [f"up{index}" for index in range(6)]
    assert all(block[2].startswith("down") for block in blocks_of(thick()))


@given(st.integers(1, 5), st.integers(0, 17), st.integers(1, 12))
def test_what_a_segment_saves_alone_is_what_the_stage_keeps_less(num_blocks: int, start: int, length: int) -> None:
    graph = thick(num_blocks)
    ops, kept, sizes = calls(graph), kept_tensors(graph), output_lines(graph)
    segment = tuple(ops[start : start + length]) or tuple(ops[-1:])
    (saved,) = saved_lines(graph, sizes, ops, kept, [segment])
    before, after = (size_line(sizes, kept_names(graph, ops, kept, runs)[0]) for runs in ([], [segment]))
    assert saved.at(ROWS) == pytest.approx(before.at(ROWS) - after.at(ROWS))


def attention(graph: Graph, source: str, name: str) -> str:
    """Softmax of a product of two activations, times a third."""
    square = TensorSpec((ROWS, 4, 4), "float32", (1, 0, 0))
    q, k, v = (graph.linear(f"{name}.{part}", source) for part in "qkv")
    scores = graph.call(f"{name}.scores", "aten.matmul.default", q, k, spec=square)
    scaled = graph.call(f"{name}.scaled", "aten.mul.Tensor", scores, 0.5, spec=square)
    shares = graph.call(f"{name}.softmax", "aten.softmax.int", scaled, -1, spec=square)
    mixed = graph.call(f"{name}.mixed", "aten.matmul.default", shares, v)
    return graph.linear(f"{name}.out", mixed)


def attending() -> ModelGraph:
    graph = Graph()
    value = attention(graph, attention(graph, graph.input("x"), "a"), "b")
    gate = graph.call("gate", "aten.softmax.int", graph.linear("router", value), -1)  # no attention: it weighs no activations by a product
    value = graph.call("gated", "aten.mul.Tensor", value, gate)
    graph.sum_loss(graph.call("fused", "aten.scaled_dot_product_attention.default", value, value, value))
    return graph.build()


def test_cores_of_attention_are_found_by_kinds_of_ops() -> None:
    graph = attending()
    found = find_cores(graph, calls(graph), activations_of(graph))
    assert found == (
        ("a.scores", "a.scaled", "a.softmax", "a.mixed"),
        ("b.scores", "b.scaled", "b.softmax", "b.mixed"),
        ("fused",),
    )


def named(num_blocks: int = 3) -> ModelGraph:
    """The blocks of `thick` as modules: ``h.0.mlp.up``, ``h.0.mlp``, ``h.0`` ..."""
    graph = thick(num_blocks)
    inside = {"up": ".mlp.up", "wide": ".mlp", "down": ""}
    ops = (
        replace(op, module=f"h.{op.name[-1]}{inside[op.name[:-1]]}") if op.name[:-1] in inside and op.kind == "call" else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))


@pytest.mark.parametrize(
    ("by_name", "expected"),
    [
        ({"*.mlp": "recompute", "*": "keep"}, (("up0", "wide0"), ("up1", "wide1"), ("up2", "wide2"))),
        ({"h.1": "recompute", "*": "keep"}, (("up1", "wide1", "down1"),)),
        ({"*.up": "keep", "h.*": "recompute", "*": "keep"}, (("wide0", "down0"), ("wide1", "down1"), ("wide2", "down2"))),
    ],
)
def test_modules_are_recomputed_by_name(by_name: dict[str, str], expected: tuple[tuple[str, ...], ...]) -> None:
    graph, there = named(), cluster((1e9,))
    assert find_modules(graph, calls(graph), tuple(by_name.items())) == expected
    plan = make_plan(graph, there, Config({"recompute.policy": by_name, "pipeline.num_micro_batch": 2}), rows=8)
    assert plan.replicas[0].stages[0].recomputed == expected
    (choice,) = (each for each in plan.choices if each.pass_name == "recompute")
    assert choice.decision == f"{sum(map(len, expected))} of 10 ops, in {counted(len(expected), 'segment')}"
    for searched in ("auto", "off"):
        config = Config({"recompute.policy": by_name, "planning.search": searched})
        stages = decide(None, graph, cluster((1e9, 1e9)), config, rows=8)[0].replicas[0].stages
        assert {run for stage in stages for run in stage.recomputed} == set(expected)


def test_what_is_recomputed_by_name_leaves_more_memory() -> None:
    graph, there = named(6), cluster((1e9,))
    peaks = {}
    for name, policy in {"named": {"*.mlp": "recompute", "*": "keep"}, "all": "none"}.items():
        _, step = plan_and_estimate(graph, there, Config({"recompute.policy": policy}), rows=64)
        peaks[name] = step.devices[0].peak.total
    assert peaks["named"] < peaks["all"]


def test_a_module_that_may_not_be_recomputed_is_told() -> None:
    graph = writing()
    graph = replace(graph, ops=tuple(replace(op, module="norm" if op.name == "norm" else "") for op in graph.ops))
    config = Config({"recompute.policy": {"norm": "recompute", "*": "keep"}})
    (choice,) = (each for each in make_plan(graph, cluster((1e9,)), config, rows=8).choices if each.pass_name == "recompute")
    assert (choice.decision, choice.bound) == ("nothing recomputed", "modules of these names have no run of ops that may be")


def test_names_of_no_module_are_refused() -> None:
    config = Config({"recompute.policy": {"*.attn": "recompute", "*": "keep"}})
    with pytest.raises(ConfigError, match=r"no op is in a module for '\*\.attn' .*\n.*the modules are h\.0\.mlp\.up, h\.0\.mlp, h\.0"):
        make_plan(named(), cluster((1e9,)), config, rows=8)
    with pytest.raises(ConfigError, match=r"\n.*all ops are in the model itself, which has no modules inside"):
        make_plan(chain(2), cluster((1e9,)), config, rows=8)
    with pytest.raises(ConfigError, match=r"\{'\*\.mlp': 'recompute', .* cannot be used with schedule recompute_early"):
        by_name = {"recompute.policy": {"*.mlp": "recompute", "*": "keep"}, "pipeline.schedule": "recompute_early"}
        make_plan(named(), cluster((1e9, 1e9)), Config(by_name | TWO_STAGES), rows=8)


def writing() -> ModelGraph:
    """A norm that writes its statistics, and an op that changes what another has made."""
    graph = Graph()
    value = graph.linear("first", graph.input("x"))
    mean = graph.parameter("mean", 8, trainable=False, kind="buffer")
    value = graph.call("norm", "aten.batch_norm.default", value, mean)
    value = graph.linear("second", value)
    graph.call("changed", "aten.add_.Tensor", value, 1.0, tags=("in_place",))
    graph.sum_loss(graph.linear("third", "changed"))
    return graph.build()


def test_ops_that_write_buffers_are_left_out_and_changed_tensors_stay_whole() -> None:
    built = writing()
    ground = find_ground(built, calls(built))
    assert [tuple(ground.ops[start:stop]) for start, stop in ground.islands] == [("first",), ("second", "changed", "third", "loss")]
    assert ground.closed[3] and not ground.closed[4]  # between second and changed


@pytest.mark.parametrize(
    ("first", "last", "obstacle"),
    [
        ("first", "first", None),
        ("second", "third", None),
        ("first", "second", "norm"),
        ("norm", "norm", "norm"),
        ("second", "second", "changed"),
    ],
)
def test_plans_by_hand_compute_nothing_again_that_writes_elsewhere(first: str, last: str, obstacle: str | None) -> None:
    graph, there = writing(), cluster((1e9,))
    plan = make_plan(graph, there, Config())
    replica = plan.replicas[0]
    stage = replace(replica.stages[0], program=program_of(replica.stages[0].ops, [(first, last)]))
    changed = replace(plan, replicas=(replace(replica, stages=(stage,)),))
    if obstacle is None:
        verify(changed, graph, there)
        return
    with pytest.raises(PlanError, match=rf"{first} .. {last} of .* cannot be recomputed: {obstacle} writes"):
        verify(changed, graph, there)


def test_shares_are_those_of_blocks_rounded_up() -> None:
    for share, expected in ((0, 0), (0.1, 1), (0.5, 3), (1, 6)):
        plan = make_plan(thick(), cluster((1e9,)), Config({"recompute.policy": {0: share}}), rows=4)
        assert sum(any(name.startswith("wide") for name in segment) for segment in plan.replicas[0].stages[0].recomputed) == expected


def test_estimates_follow() -> None:
    config = Config({**TWO_STAGES, "pipeline.num_micro_batch": 8})
    keeping, again = (
        make_plan(thick(), cluster((1e9, 1e9)), c, rows=64) for c in (config, config.with_values({"recompute.policy": {0: 1, 1: 1}}))
    )
    for before, after in zip(keeping.replicas[0].stages, again.replicas[0].stages, strict=True):
        assert after.estimates[0].activation_bytes < before.estimates[0].activation_bytes
        assert after.estimates[0].backward == pytest.approx(before.estimates[0].backward + before.estimates[0].forward, rel=0.02)
    whole = make_plan(thick(), cluster((1e9, 1e9)), config.with_values({"recompute.policy": "full"}), rows=64)
    assert whole.pipelines[0].recomputed_stages == (0, 1) and not whole.replicas[0].stages[0].recomputed
    assert whole.replicas[0].stages[0].estimates[0].activation_bytes < keeping.replicas[0].stages[0].estimates[0].activation_bytes


def tight(memory: tuple[int, ...]) -> Cluster:
    devices = tuple(device(f"h/{index}", "h", 1e9, size) for index, size in enumerate(memory))
    return Cluster("tight", (Host("h", devices, Link(1e10, 1e-6)),), None)


def fullest(step: StepEstimate) -> float:
    """The share of what it may use that is filled on the fullest device."""
    return max(each.peak.total / each.capacity for each in step.devices)


@pytest.mark.slow
@example(memory=[706_420, 706_420], schedule="1f1b", num_micro_batch=1, rows=64, blocks=6)  # all of it fits by the estimate alone
@example(memory=[935_148, 331_061], schedule="eager_1f1b", num_micro_batch=6, rows=16, blocks=9)  # of blocks, only all of them
@example(memory=[419_738, 376_289], schedule="zb_h1", num_micro_batch=5, rows=64, blocks=6)
@example(memory=[1_217_315, 411_304], schedule="zb_h1", num_micro_batch=2, rows=61, blocks=6)  # none only after three attempts
@example(memory=[200_000, 580_839], schedule="zb_h1", num_micro_batch=8, rows=61, blocks=6)  # some again, and faster
@given(
    memory=st.lists(st.integers(200_000, 3_000_000), min_size=2, max_size=2),
    schedule=st.sampled_from(("1f1b", "eager_1f1b", "zb_h1", "zb_h2")),
    num_micro_batch=st.integers(1, 8),
    rows=st.sampled_from((16, 61, 64)),
    blocks=st.sampled_from((6, 9)),
)
def test_auto_fits_where_recomputing_everything_does_and_keeps_everything_where_that_fits_and_is_about_as_fast(
    memory: list[int], schedule: str, num_micro_batch: int, rows: int, blocks: int
) -> None:
    there, graph = tight(tuple(memory)), thick(blocks)
    config = Config({"pipeline.num_stages": 2, "pipeline.num_micro_batch": num_micro_batch, "pipeline.schedule": schedule})

    fullness: dict[str, float] = {}

    def plan(policy: object) -> Plan | None:
        with suppress(MemoryShortage):
            found, step = plan_and_estimate(graph, there, config.with_values({"recompute.policy": policy}), rows=rows)
            fullness[str(policy)] = fullest(step)
            assert fullest(step) <= 1
            return found
        return None

    keeping, everything, auto = plan("none"), plan({0: 1, 1: 1}), plan("auto")
    if keeping is not None:
        assert auto is not None
        if replace(auto, choices=()) != replace(keeping, choices=()):  # what nearly fills a device may have been cut for its memory
            assert fullness["none"] > FULL and auto.step_seconds * WORTH_KEEPING <= keeping.step_seconds
    elif everything is not None:
        assert auto is not None
    if auto is not None:
        assert keeping is not None or any(stage.recomputed for stage in auto.replicas[0].stages)


def test_each_device_recomputes_as_its_own_memory_demands(golden: Callable[[str, str], None]) -> None:
    config = Config({"pipeline.num_stages": 3, "pipeline.num_micro_batch": 8, "recompute.policy": "auto"})
    plan = make_plan(thick(9), tight((460_000,) * 3), config, rows=128)
    counts = [len(stage.recomputed) for stage in plan.replicas[0].stages]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0 == counts[-1]
    assert from_json(Plan, to_json(plan)) == plan
    golden("plans/recomputing.txt", plan_text(plan))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"recompute.policy": {2: 0.5}}, r"recompute\.policy names stage 2; the last stage is 1"),
        (
            {"recompute.policy": "selective", "pipeline.schedule": "recompute_early"},
            "schedule recompute_early, which recomputes whole stages",
        ),
        ({"recompute.policy": {0: 0.5}, "pipeline.schedule": "recompute_early"}, "schedule recompute_early, which recomputes whole stages"),
        ({"pipeline.schedule": "interleaved", "pipeline.num_chunks": 5}, r"the 10 stages of schedule interleaved with 5 chunks on 2 ranks"),
    ],
)
def test_what_does_not_go_together(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(thick(2), cluster((1e9, 1e9)), Config({**TWO_STAGES, **config}), rows=8)


def test_too_few_task_graphs_for_the_chunks() -> None:
    graph = chain(2, [(scope(0, 1, "front"),), (scope(1, 1, "back"),)])
    config = Config({"pipeline.schedule": "interleaved", "pipeline.num_chunks": 4})
    with pytest.raises(ConfigError, match=r"the scopes make 2 stages \(front, back\); .* needs a multiple of 4"):
        make_plan(graph, cluster((1e9, 1e9)), config, rows=8)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_hold_what_the_schedule_promises(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved", "aiao", "aiao_early_loss") else 1
    config = Config({"pipeline.schedule": schedule, "pipeline.num_stages": 3, "pipeline.num_micro_batch": 6, "pipeline.num_chunks": chunks})
    pipeline = shape_pipeline(config, None, 3)
    peaks, _ = most_held(schedule, num_ranks=3, num_micro_batch=6, num_chunks=chunks)
    for rank, peak in enumerate(peaks):
        stages = pipeline.stages_of(rank)
        assert peak <= sum(pipeline.in_flight[stage] for stage in stages) < peak + len(stages)
    assert any(pipeline.recomputed) == (schedule in ("recompute_early", "last_no_recompute", "shifted_critical_path"))
    whole = shape_pipeline(config.with_values({"recompute.policy": "full"}), None, 3)
    assert any(whole.recomputed) and bool(whole.recomputed_stages) != any(pipeline.recomputed)
    assert read_policy("full", whole, chain(1)) == read_policy("none", pipeline, chain(1))


@pytest.mark.parametrize("schedule", ["recompute_early", "last_no_recompute", "shifted_critical_path"])
def test_stages_say_what_they_recompute_under_schedules_that_recompute_by_themselves(schedule: str) -> None:
    config = Config({"pipeline.schedule": schedule, "pipeline.num_stages": 3, "pipeline.num_micro_batch": 4})
    graph, there = thick(9), cluster((1e9,) * 3)
    every = make_plan(graph, there, config, rows=32).replicas[0]
    some = make_plan(graph, there, config.with_values({"recompute.policy": {0: "full", 1: 0.5}}), rows=32).replicas[0]
    assert every.pipeline.recomputed_stages == () and some.pipeline.recomputed_stages == (0,)
    assert not any(stage.recomputed for stage in every.stages)
    assert [bool(stage.recomputed) for stage in some.stages] == [False, True, False]
    order = training_schedule(some.pipeline, edge_pairs(some))
    assert count_recomputed(order) == (1, 0, 0)
    own, of_all = (
        [[each for each in actions if each.kind in (Kind.FORWARD, Kind.BACKWARD)] for actions in schedule.ranks]
        for schedule in (order, training_schedule(every.pipeline, edge_pairs(every)))
    )
    assert own == of_all


@pytest.mark.parametrize("search", ["off", "auto"])
@pytest.mark.parametrize("schedule", ["recompute_early", "last_no_recompute", "shifted_critical_path"])
def test_memory_decides_what_such_schedules_recompute(schedule: str, search: str) -> None:
    """Nothing where all fits; as little as memory needs below that: whole stages early, or blocks; each plan fits by the estimate."""
    settings = {"pipeline.schedule": schedule, "pipeline.num_stages": 4, "pipeline.num_micro_batch": 8, "planning.search": search}
    graph, recomputed, seconds = thick(12), [], []
    for memory in (1_000_000, 500_000, 400_000):
        there = tight((memory,) * 4)
        plan, step = decide(None, graph, there, Config({**settings, "recompute.policy": "auto"}), rows=128)
        verify(plan, graph, there)
        assert fullest(step) <= 1
        (replica,) = plan.replicas
        in_parts = {stage.index for stage in replica.stages if stage.recomputed}
        alive = count_recomputed(training_schedule(replica.pipeline, edge_pairs(replica)))
        as_a_whole = {stage for stage, count in enumerate(alive) if count}
        assert not in_parts & as_a_whole and 3 not in as_a_whole | in_parts
        recomputed.append((in_parts, as_a_whole))
        seconds.append(step.step_seconds)
        with suppress(WhaleError):  # recomputing all of every stage is no faster, where it fits
            whole = decide(None, graph, there, Config({**settings, "recompute.policy": "full"}), rows=128)[1]
            assert step.step_seconds <= whole.step_seconds
    assert recomputed[0] == (set(), set()) and all(len(parts | whole) for parts, whole in recomputed[1:])
    assert seconds[0] == min(seconds)


@pytest.mark.parametrize("schedule", ["recompute_early", "last_no_recompute", "shifted_critical_path"])
def test_what_fits_with_every_block_in_the_plain_order_fits_under_such_schedules(schedule: str) -> None:
    graph = GPT(layers=8, hidden=512, heads=8, sequence=256, vocabulary=8000).graph()
    there = parse_cluster("name: c\nhosts:\n  - {name: h, devices: 4 x V100-16GB}\n")
    settings = {"pipeline.num_stages": 4, "pipeline.num_micro_batch": 8, "recompute.policy": "auto", "planning.search": "off"}
    config = Config({**settings, "memory.fraction": 0.021, "estimate.communicator_bytes": 0})
    plain, plan = (make_plan(graph, there, config.with_values({"pipeline.schedule": name}), rows=64) for name in ("1f1b", schedule))
    assert plan.replicas == plain.replicas and all(stage.recomputed for stage in plan.replicas[0].stages[:1])
    refused = []
    for name in ("1f1b", schedule):  # with less, both lack as much
        with pytest.raises(MemoryShortage) as caught:
            make_plan(graph, there, config.with_values({"pipeline.schedule": name, "memory.fraction": 0.0205}), rows=64)
        refused.append(caught.value)
    assert refused[0].num_bytes == refused[1].num_bytes > 0 and refused[0].message == refused[1].message


def test_a_schedule_without_anything_to_recompute_is_1f1b_and_says_so() -> None:
    config = Config({"pipeline.schedule": "shifted_critical_path", "pipeline.num_stages": 4, "pipeline.num_micro_batch": 8})
    auto = make_plan(thick(12), tight((1_000_000,) * 4), config.with_values({"recompute.policy": "auto"}), rows=128)
    assert auto.pipelines[0].schedule == "1f1b" and auto.pipelines[0].recomputed_stages == ()
    (said,) = [choice for choice in auto.choices if choice.subject == "schedule"]
    assert "1f1b" in said.decision and "no stage recomputes as a whole, as under shifted_critical_path" in said.bound
    plain = make_plan(thick(12), tight((1_000_000,) * 4), config.with_values({"pipeline.schedule": "1f1b"}), rows=128)
    assert auto.replicas == plain.replicas


@given(st.integers(0, 12), st.sets(st.integers(0, 12), max_size=6), st.booleans())
def test_a_program_covers_the_ops(num_ops: int, bounds: set[int], in_halves: bool) -> None:
    ops = [f"op{index}" for index in range(num_ops)]
    ends = sorted(bound for bound in bounds if bound <= num_ops)
    runs = [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
    program = program_of(ops, [(ops[start], ops[stop - 1]) for start, stop in runs], in_halves=in_halves)
    covered = [(ops.index(own.first), ops.index(own.last) + 1) for own in program]
    assert [place for start, stop in covered for place in range(start, stop)] == list(range(num_ops))
    assert [place for place, own in zip(covered, program, strict=True) if own.recompute] == runs
    assert all(own.in_halves == in_halves for own in program)


def test_verify_names_segments_that_do_not_cover_a_stage() -> None:
    graph, there = thick(), cluster((1e9,))
    plan = make_plan(graph, there, Config({"recompute.policy": {0: 1}}), rows=4)
    verify(plan, graph, there)

    stage = plan.replicas[0].stages[0]
    ops, first, last = stage.ops, stage.ops[0], stage.ops[-1]

    def changed(*program: Segment) -> Plan:
        return replace(plan, replicas=(replace(plan.replicas[0], stages=(replace(stage, program=program),)),))

    for runs in (
        (),
        ((first, "nowhere"),),
        ((last, first),),
        ((first, ops[3]), (ops[3], last)),
        ((first, ops[3]), (ops[5], last)),
        ((ops[4], last), (first, ops[3])),
        ((first, ops[3]),),
    ):
        with pytest.raises(PlanError, match=r"do not cover its .* ops in order, each once"):
            verify(changed(*(Segment(*run, recompute=True) for run in runs)), graph, there)
    verify(changed(*program_of(ops, (("up0", "up0"), ("wide0", "down0")))), graph, there)
    with pytest.raises(PlanError, match="is recomputed both as a whole"):
        replica = plan.replicas[0]
        verify(replace(plan, replicas=(replace(replica, pipeline=replace(replica.pipeline, recomputed_stages=(0,))),)), graph, there)

"""Plans for a really captured GPT: cut automatically, by scopes, and carried to evaluation and prediction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.unit.planning.graphs import cluster
from whale.capture import capture
from whale.config import Config
from whale.planning import make_plan, retarget_plan
from whale.planning.verify import verify

WIDTH, LENGTH, VOCABULARY, LAYERS = 32, 12, 53, 4
MIXED = cluster((4e9,) * 4, (1e9,) * 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, scopes: bool) -> None:
        super().__init__()
        scope = whale.replicate if scopes else nothing
        with scope(device_count=2, name="front"):
            self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.front = nn.ModuleList(Block() for _ in range(LAYERS // 2))
        with scope(device_count=1, name="back"):
            self.back = nn.ModuleList(Block() for _ in range(LAYERS // 2))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0)[:, None, None, :] & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=ids.device).tril()
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in (*self.front, *self.back):
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


def nothing(**_: Any) -> Any:
    return torch.enable_grad()


def loss(output: Tensor, batch: tuple[Tensor]) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())


BATCH = (torch.ones(4, LENGTH, dtype=torch.long),)


@pytest.mark.slow
def test_a_cut_gpt_sends_activations_and_repeats_masks() -> None:
    graph, _ = capture(GPT(scopes=False), BATCH, loss)
    config = Config({"pipeline.num_stages": 4, "pipeline.num_micro_batch": 4})
    plan = make_plan(graph, MIXED, config, rows=40)
    assert len(plan.replicas) == 2 and plan.replicas[0].share > plan.replicas[1].share
    assert not plan.idle_devices
    for replica in plan.replicas:
        assert [(edge.source, edge.target) for edge in replica.edges] == [(0, 1), (1, 2), (2, 3)]
        travelling = {name for edge in replica.edges for name in edge.tensors}
        assert all(graph.by_name[name].requires_grad for name in travelling)
        assert travelling <= dict(plan.batch_axes).keys()
        assert [("tokens.weight" in stage.parameters) for stage in replica.stages] == [True, False, False, True]


@pytest.mark.slow
def test_a_gpt_under_scopes_and_its_other_modes() -> None:
    model = GPT(scopes=True)
    graph, _ = capture(model, BATCH, loss)
    plan = make_plan(graph, MIXED, Config({"pipeline.num_micro_batch": 2}), rows=40)
    assert len(plan.replicas) == 2 and len(plan.idle_devices) == 2
    front, back = plan.replicas[0].stages
    assert (front.task_graphs, back.task_graphs) == (("front",), ("back",))
    assert len(front.virtual_device.devices) == 2 and len(back.virtual_device.devices) == 1
    assert all(len(edge.tensors) == 1 for replica in plan.replicas for edge in replica.edges)
    for mode in ("eval", "predict"):
        other, _ = capture(model, BATCH, loss, mode=mode)
        carried = retarget_plan(plan, graph, other)
        verify(carried, other, MIXED)
        assert [stage.parameters for stage in carried.replicas[0].stages] == [front.parameters, back.parameters]
        assert [edge.tensors for edge in carried.replicas[0].edges] == [edge.tensors for edge in plan.replicas[0].edges]

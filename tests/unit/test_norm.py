"""The total norm on one rank, and what ranks make of each other's."""

import pytest
import torch
from torch import nn

from orlop import SwapAdamW, TrainEngine
from orlop.norm import total_norm
from orlop.ranks import Ranks


def test_plain_float32_gradients_are_clipped_with_torchs_bits():
    model = nn.Sequential(*(nn.Linear(17, 17) for _ in range(9)))
    engine = TrainEngine(model, SwapAdamW(model.parameters()), max_grad_norm=0.1)
    params = list(model.parameters())
    for seed in range(50):
        torch.manual_seed(seed)
        gradients = [torch.randn_like(param) for param in params]
        for param, gradient in zip(params, gradients):
            param.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(params, 0.1)
        clipped = [param.grad for param in params]
        for param, gradient in zip(params, gradients):
            param.grad = gradient
        assert torch.equal(engine.clip_grad_norm(), expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, clipped, strict=True))


class Two(Ranks):
    """This rank, and another one that has these gradients."""

    def __init__(self, other):
        super().__init__(0, 2, None)
        self.other, self.asked = list(other.values()), 0

    def gather_floats(self, *values):
        self.asked += 1
        if len(values) == 2:
            return [values, (1.0, torch.nn.utils.get_total_norm(self.other).item())]
        return [values, (sum(each.norm().double().square().item() for each in self.other) / 2,)]


def _gradients(seed):
    torch.manual_seed(seed)
    return {f"w{index}": torch.randn(33, 7) for index in range(9)}


def test_replicas_that_agree_have_torchs_bits_after_one_question():
    gradients = _gradients(0)
    ranks = Two(gradients)
    norm = total_norm(gradients, dict.fromkeys(gradients, 2), ranks)
    assert torch.equal(norm, torch.nn.utils.get_total_norm(list(gradients.values())))
    assert ranks.asked == 1
    gradients["w3"][0, 0] = float("nan")
    ranks = Two(gradients)
    assert total_norm(gradients, dict.fromkeys(gradients, 2), ranks).isnan()
    assert ranks.asked == 1


def test_replicas_that_differ_still_have_one_norm():
    gradients, others = _gradients(0), _gradients(1)
    squares = sum(each.double().square().sum() for each in (*gradients.values(), *others.values())) / 2
    for mine, theirs in ((gradients, others), (others, gradients)):
        norm = total_norm(mine, dict.fromkeys(mine, 2), Two(theirs))
        assert norm.item() == pytest.approx(squares.sqrt().item(), rel=1e-7)


def test_low_precision_is_measured_more_precisely_than_by_torch():
    gradients = {name: each.to(torch.bfloat16) for name, each in _gradients(0).items()}
    exact = sum(each.double().square().sum() for each in gradients.values()).sqrt().item()
    norm = total_norm(gradients, dict.fromkeys(gradients, 1), Ranks.create())
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    assert torch.nn.utils.get_total_norm(list(gradients.values())).item() != pytest.approx(exact, rel=1e-4)

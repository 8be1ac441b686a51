"""A layer's pass and gradient with a carried change, against both products in double precision."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tether.models.carried import MergedChange, carriers, carry

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARES = (3e-4, 1e-3, 3e-3, 1e-2)
INPUTS, OUTPUTS, RANK = 384, 512, 8
PEFT = {3e-4: 0.4, 1e-3: 0.75, 3e-3: 0.97, 1e-2: 1.0}
"""Two roundings keep less than this."""


class Model(nn.Module):
    dtype = torch.bfloat16

    def __init__(self, kind, bias):
        super().__init__()
        layer = nn.Linear(INPUTS, OUTPUTS, bias) if kind is nn.Linear else Conv1D(OUTPUTS, INPUTS)
        nn.init.normal_(layer.weight, 0, 0.02)
        if layer.bias is not None:
            nn.init.normal_(layer.bias, 0, 0.5)
        self.layer = layer.bfloat16().requires_grad_(False)


def carrying(share, device, kind=nn.Linear, *, bias=False):
    """A layer that carries a change of this share of its weight (rms), and the change in double
    precision, (outputs, inputs).
    """
    torch.manual_seed(0)
    model = Model(kind, bias).to(device)
    down, up = torch.randn(RANK, INPUTS), torch.randn(OUTPUTS, RANK)
    up *= share * model.layer.weight.float().norm().cpu() / (up @ down).norm()
    carry(model, MergedChange({"layer": (down, up)}, torch.bfloat16))
    ((_, layer),) = carriers(model)
    return layer, layer.carried_up.double() @ layer.carried_down.double()


def share_of(result, without, change):
    """<y - W x, D x> / <D x, D x>."""
    return float(((result.double() - without) * change).sum() / change.square().sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "bias"), [(nn.Linear, False), (nn.Linear, True), (Conv1D, True)])
@pytest.mark.parametrize("share", SHARES)
def test_a_pass_and_its_gradient_have_all_of_a_carried_change(share, kind, bias, device):
    layer, change = carrying(share, device, kind, bias=bias)
    weight = layer.weight.double() if kind is nn.Linear else layer.weight.double().T
    states = torch.randn(4, 300, INPUTS, device=device).bfloat16().requires_grad_()
    slopes = torch.randn(4, 300, OUTPUTS, device=device).bfloat16()
    made = layer(states)
    (back,) = torch.autograd.grad(made, states, slopes)
    exact, offset = states.detach().double(), 0.0 if layer.bias is None else layer.bias.double()
    there = share_of(made.detach(), exact @ weight.T + offset, exact @ change.T)
    again = share_of(back, slopes.double() @ weight, slopes.double() @ change)
    assert there == pytest.approx(1, abs=0.05) and again == pytest.approx(1, abs=0.05)

    rounded = (exact @ weight.T).bfloat16()
    twice = rounded + (exact @ change.T).bfloat16()
    assert share_of(twice, exact @ weight.T, exact @ change.T) < PEFT[share]


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_learns_beside_a_change_gets_its_gradient(device):
    layer, _ = carrying(1e-2, device)
    layer.weight.requires_grad_()
    states = torch.randn(2, 50, INPUTS, device=device).bfloat16()
    slopes = torch.randn(2, 50, OUTPUTS, device=device).bfloat16()
    layer(states).backward(slopes)
    expected = slopes.flatten(0, 1).double().T @ states.flatten(0, 1).double()
    torch.testing.assert_close(layer.weight.grad.double(), expected, rtol=1e-2, atol=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_one_rounding_costs_a_card_little(rows):
    """A layer of 4,096 by 4,096 that carries rank 16, against the same layer with peft's adapter:
    it takes at most one and a half times as long.
    """
    from peft import LoraConfig, inject_adapter_in_model

    def timed(layer):
        states = torch.randn(rows, 4096, device="cuda").bfloat16()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(60):
            if turn == 10:
                begin.record()
            layer(states)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 50

    model = Model(nn.Linear, False)
    model.layer = nn.Linear(4096, 4096, bias=False).bfloat16().requires_grad_(False)
    carry(
        model,
        MergedChange({"layer": (torch.randn(16, 4096), torch.zeros(4096, 16))}, model.dtype),
    )
    peft = nn.ModuleDict({"layer": nn.Linear(4096, 4096, bias=False).bfloat16()})
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["layer"]), peft)
    peft["layer"].to(torch.bfloat16)
    with torch.no_grad():
        own, theirs = timed(model.cuda().layer), timed(peft.cuda()["layer"])
    assert own < 1.5 * theirs, (own, theirs)

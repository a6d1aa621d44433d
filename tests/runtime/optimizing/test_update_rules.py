"""The update rules: bit by bit the weights and the state of torch's own optimizers, without the compiler that those import."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracles.optimizers import torch_optimizer
from torch import nn

from penstock.runtime.optimizing.update_rules import update_rule
from penstock.runtime.settings import OptimizerSettings

CASES = {
    "adamw": OptimizerSettings("adamw", weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3),
    "sgd": OptimizerSettings("sgd", weight_decay=0.1, momentum=0.8),
    "sgd without momentum": OptimizerSettings("sgd", weight_decay=0.0, momentum=0.0),
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (13,), (1,), (64, 9))]


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_weights_and_state_are_torchs(settings: OptimizerSettings) -> None:
    """One weight has a gradient only from the third step on, and the learning rate changes."""
    mine, its = weights(), weights()
    rule, optimizer = update_rule(settings, mine, 1e-2), torch_optimizer(settings, its, 1e-2)
    late = settings.kind == "adamw"  # torch's SGD takes no weights of different ages at once
    for step in range(5):
        rule.lr = optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        for number, (one, other) in enumerate(zip(mine, its, strict=True)):
            if not (late and number == 2 and step < 2):
                one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(10 * step + number))
                other.grad = one.grad.clone()
        rule.step()
        optimizer.step()
        for one, other in zip(mine, its, strict=True):
            assert torch.equal(one, other)
            kept = {name: value for name, value in optimizer.state[other].items() if value is not None}
            assert rule.state[one].keys() == kept.keys()
            for name, value in kept.items():
                assert torch.equal(rule.state[one][name], value) and rule.state[one][name].dtype == value.dtype
    assert not torch.equal(mine[0], weights()[0])


def test_neither_the_start_of_a_run_nor_a_step_imports_the_compiler() -> None:
    code = (
        "import sys, torch, penstock.runtime.trainer\n"
        "from penstock.runtime.optimizing.optimizer import make_optimizer\n"
        "from penstock.runtime.settings import OptimizerSettings\n"
        "for kind in ('adamw', 'sgd'):\n"
        "    weight = torch.nn.Parameter(torch.ones(3))\n"
        "    weight.grad = torch.ones(3)\n"
        "    optimizer = make_optimizer([weight], OptimizerSettings(kind))\n"
        "    optimizer.step(torch.ones(()))\n"
        "    optimizer.zero_grad()\n"
        "print('torch._dynamo' in sys.modules, bool((weight != 1).all()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.stdout == "False True\n", done.stderr

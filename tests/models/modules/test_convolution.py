"""Convolutional modules against their description, against plain torch, and divided over two ranks against one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from distributed import run_ranks
from oracles.kept import kept_bytes
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from penstock.models.modules import Batch, Carry, OpModule, TensorParallel, build_chain
from penstock.models.modules.convolution import MODULES
from penstock.models.ops import Model
from penstock.models.resnet import RESNET_SIZES, ResNetConfig, resnet
from penstock.models.shapes import Shape
from penstock.models.vgg import VGG_SIZES, VggConfig, vgg

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

SMALL = {
    "resnet": resnet(ResNetConfig((2, 1, 2), 8, num_classes=12, image_size=33)),
    "resnet-bf16": resnet(ResNetConfig((2, 1), 8, num_classes=12, image_size=32, dtype="bf16")),
    "wide": resnet(ResNetConfig((2, 2), 8, width_factor=2, wide_conv1=False, num_classes=12, image_size=32)),
    "cifar-stem": resnet(ResNetConfig((1, 2), 8, num_classes=12, image_size=16, stem_kernel=3, stem_stride=1, stem_pool=False)),
    "vgg": vgg(VggConfig((1, 2), (8, 16), classifier_width=24, num_classes=12, image_size=16)),
    "vgg-7x7": vgg(VggConfig((1, 1), (8, 16), classifier_width=24, num_classes=12, image_size=28)),
    "vgg-bf16": vgg(VggConfig((1, 1), (8, 16), classifier_width=24, num_classes=12, image_size=16, dtype="bf16")),
}
FULL = {"resnet-50": resnet(RESNET_SIZES["resnet-50"]), "wide-resnet-500m": resnet(RESNET_SIZES["wide-resnet-500m"]),
        "vgg16": vgg(VGG_SIZES["vgg16"])}  # fmt: skip


def build(model: Model, *, tp: TensorParallel | None = None, algo: int = 0, device: str = "cpu") -> list[OpModule]:
    """Every module of the chain."""
    return list(build_chain(model, tp=tp, algos=algos_of(model, algo), device=device).ops)


def batch_of(model: Model, samples: int, device: str = "cpu") -> Batch:
    """Random images and classes; unequal weights that sum to one."""
    generator = torch.Generator().manual_seed(1)
    size, classes = model.config["image_size"], model.config["num_classes"]
    weights = torch.arange(1, samples + 1) / sum(range(1, samples + 1))
    if device == "meta":
        images, targets = torch.empty(samples, 3, size, size, device="meta"), torch.empty(samples, dtype=torch.int64, device="meta")
    else:
        images = torch.randn(samples, 3, size, size, generator=generator)
        targets = torch.randint(0, classes, (samples,), generator=generator)
    return Batch(weights=weights.to(device), images=images.to(device, DTYPES[model.dtype]), targets=targets.to(device))


def run(modules: list[OpModule], batch: Batch) -> torch.Tensor:
    """The loss of the whole chain."""
    carry: Carry = {}
    for module in modules:
        carry = module(carry, batch)
    return carry["loss"]


def algos_of(model: Model, algo: int) -> list[int]:
    """`algo` where the op has it, else 0."""
    return [min(algo, len(placed.op.splits) - 1) for placed in model.ops]


def kept_by_description(model: Model, samples: int, algo: int = 0, tp: int = 1) -> float:
    """Bytes the description says the whole chain keeps."""
    return kept_bytes(model, 0, model.num_ops, Shape.images(samples), tp, algos_of(model, algo))


def storage(tensor: torch.Tensor) -> int:
    """Names the memory behind a tensor, also on the meta device."""
    return tensor.untyped_storage()._cdata


class Saved:
    """The distinct storages that autograd saves inside this context, without weights, buffers and the micro-batch."""

    def __init__(self, modules: list[OpModule], batch: Batch) -> None:
        given = [t for m in modules for t in (*m.parameters(), *m.buffers())] + [batch.images, batch.targets, batch.weights]
        self.ignored = {storage(t) for t in given}
        self.found: dict[int, torch.Tensor] = {}
        self.hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if storage(tensor) not in self.ignored:
            self.found.setdefault(storage(tensor), tensor)
        return tensor

    def names(self, carry: Carry) -> set[str]:
        """The carry tensors among them."""
        return {name for name, tensor in carry.items() if storage(tensor) in self.found}

    def size_bytes(self, *without: Carry) -> int:
        """Bytes of all of them but the tensors of these carries."""
        known = {storage(tensor) for carry in without for tensor in carry.values()}
        return sum(t.untyped_storage().nbytes() for key, t in self.found.items() if key not in known)


def kept_by_torch(modules: list[OpModule], batch: Batch) -> int:
    """Bytes autograd saves for the whole chain."""
    saved = Saved(modules, batch)
    with saved.hooks:
        run(modules, batch)
    return saved.size_bytes()


@pytest.mark.parametrize("name", SMALL)
def test_a_step_reaches_every_weight(name: str) -> None:
    modules = build(SMALL[name])
    loss = run(modules, batch_of(SMALL[name], 4))
    assert loss.dtype == torch.float32 and loss.shape == () and torch.isfinite(loss)
    loss.backward()
    for module in modules:
        for param, weight in module.named_parameters():
            assert weight.grad is not None and torch.isfinite(weight.grad).all() and weight.grad.any(), f"{module.name}.{param}"


# The full sizes run on the meta device.
CASES = [(name, "cpu") for name in SMALL] + [(name, "meta") for name in FULL]
if torch.cuda.is_available():
    CASES += [(name, "cuda") for name in (*SMALL, *FULL)]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_ops_are_as_described(name: str, device: str) -> None:
    """Shapes, weights, flops and saved tensors of each op alone."""
    model = {**SMALL, **FULL}[name]
    batch = batch_of(model, 3, device)
    carry: Carry = {}
    for module in build(model, device=device):
        op = module.op
        own = {n: t.detach().requires_grad_() for n, t in carry.items()}
        saved = Saved([module], batch)
        with FlopCounterMode(display=False) as forward, saved.hooks:
            out = module(own, batch)
        assert {s.name: s.shape(batch.shape) for s in op.carry} == {n: tuple(t.shape) for n, t in out.items()}, module.name
        assert all(t.dtype == DTYPES[s.dtype if s.dtype != "compute" else model.dtype] for s, t in zip(op.carry, out.values(), strict=True))
        split = op.splits[0]
        made = {n: t for n, t in out.items() if storage(t) not in map(storage, own.values())}
        assert (saved.names(own), saved.names(made)) == (set(split.saves_in), set(split.saves_out)), module.name
        assert saved.size_bytes(own, out) == split.kept.at(batch.shape), module.name
        carry = {n: t.detach().clone() for n, t in out.items()}
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(list(out.values()), [torch.ones_like(t) for t in out.values()])
        assert forward.get_total_flops() == op.flops.at(batch.shape), module.name
        assert backward.get_total_flops() == op.backward_flops.at(batch.shape), module.name
        assert sum(p.numel() for p in module.parameters()) == op.parameters.at(batch.shape), module.name


@pytest.mark.parametrize(("name", "device"), CASES)
def test_kept_bytes_of_a_chain_are_as_described(name: str, device: str) -> None:
    model = {**SMALL, **FULL}[name]
    assert kept_by_torch(build(model, device=device), batch_of(model, 3, device)) == kept_by_description(model, 3)


class Bottleneck(nn.Module):
    """A plain ResNet block, in the order of this project's ops."""

    def __init__(self, inputs: int, inner: int, wide: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.side = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)) if project else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.side(x))


def plain_resnet(c: ResNetConfig) -> nn.Sequential:
    """The same network without this project."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, c.base_width, 7, 2, 3, bias=False), nn.BatchNorm2d(c.base_width), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = c.base_width
    for stage, copies in enumerate(c.blocks):
        width = c.base_width * 2**stage
        inner = width * (c.width_factor if c.wide_conv1 else 1)
        for i in range(copies):
            stride = 2 if stage and i == 0 else 1
            layers.append(Bottleneck(channels, inner, width * c.width_factor, 4 * width, stride, i == 0))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, c.num_classes))


def plain_vgg(c: VggConfig) -> nn.Sequential:
    """torchvision's order of layers; no dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for copies, width in zip(c.convs, c.widths, strict=True):
        for _ in range(copies):
            layers += [nn.Conv2d(channels, width, 3, 1, 1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2, 2))
    sizes = (channels * 49, c.classifier_width, c.classifier_width, c.num_classes)
    head = [nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]), nn.ReLU(), nn.Linear(sizes[2], sizes[3])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


@pytest.mark.parametrize(
    ("model", "plain"),
    [(resnet(c), plain_resnet(c)) for c in (ResNetConfig((2, 1), 8, num_classes=12, image_size=33),
                                            ResNetConfig((1, 2), 8, 2, wide_conv1=False, num_classes=12, image_size=48))]
    + [(vgg(c), plain_vgg(c)) for c in (VggConfig((1, 2), (8, 16), 24, 12, 20, dropout=0.0), VggConfig((1, 1), (8, 16), 24, 12, 28, 0.0))],
    ids=["resnet", "wide-resnet", "vgg", "vgg-7x7"],
)  # fmt: skip
def test_equals_plain_torch(model: Model, plain: nn.Sequential) -> None:
    """Same weights, same loss, gradients and running statistics."""
    modules, batch = build(model), batch_of(model, 6)
    pairs = list(zip((p for m in modules for p in m.parameters()), plain.parameters(), strict=True))
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(ours)
    expected = (nn.functional.cross_entropy(plain(batch.images), batch.targets, reduction="none") * batch.weights).sum()
    loss = run(modules, batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    moved = [b for b in plain.buffers() if b.is_floating_point()]
    for ours, theirs in zip((b for m in modules for b in m.buffers()), moved, strict=True):
        torch.testing.assert_close(ours, theirs)
    batch.training = False
    plain.eval()
    expected = (nn.functional.cross_entropy(plain(batch.images), batch.targets, reduction="none") * batch.weights).sum()
    torch.testing.assert_close(run(modules, batch), expected)


@pytest.mark.parametrize("name", ["resnet", "vgg"])
def test_recomputation_changes_nothing(name: str) -> None:
    """The loss, the gradients and the running statistics, which a second forward pass must not move again."""
    model = SMALL[name]
    batch = batch_of(model, 4)
    plain, again = build_chain(model), build_chain(model)
    losses = [plain(batch)["loss"], again(batch, recompute=range(1, model.num_ops - 1))["loss"]]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, again.buffers(), plain.buffers()))


def test_every_kind_has_its_module() -> None:
    kinds = {op.kind: type(module) for name in SMALL for op, module in ((m.op, m) for m in build(SMALL[name]))}
    assert kinds == MODULES


def test_dropout_follows_seed_and_step() -> None:
    model = SMALL["vgg"]
    modules, batch = build(model), batch_of(model, 4)
    first = run(modules, batch)
    assert torch.equal(run(modules, batch), first)
    batch.step = 1
    assert not torch.equal(run(modules, batch), first)
    batch.training = False
    evaluated = run(modules, batch)
    batch.step, batch.seed = 7, 9
    assert torch.equal(run(modules, batch), evaluated) and not torch.equal(evaluated, first)


def test_two_ranks_equal_one() -> None:
    """Each rank checks its part of every weight's gradient against an undivided run; both algos, gloo."""
    run_ranks(check_rank, 2)


def check_rank(rank: int) -> None:
    tp = TensorParallel(rank, 2)
    for name, algo in ((name, algo) for name in ("resnet", "wide", "vgg") for algo in (0, 1)):
        model = SMALL[name]
        batch = batch_of(model, 4)
        whole, parts = build(model), build(model, tp=tp, algo=algo)
        for one, two, expected, found in _steps(whole, parts, batch):
            label = f"{name} algo {algo} {two.name}"
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m, label=label: f"{label}: {m}")
            for param, weight in two.named_parameters():
                shard, gradient = two.shards[param], one.get_parameter(param).grad
                gradient = gradient if shard is None else shard(gradient)
                torch.testing.assert_close(weight.grad, gradient, rtol=1e-3, atol=1e-4, msg=lambda m, label=label: f"{label}: {m}")
        if algo == 0:  # where inputs are divided, biases stay whole, which the description leaves out
            assert sum(p.numel() for m in parts for p in m.parameters()) == sum(m.op.parameters.at(batch.shape, 2) for m in parts)
        assert kept_by_torch(parts, batch) == kept_by_description(model, 4, algo, 2), f"{name} algo {algo}"


def _steps(whole: list[OpModule], parts: list[OpModule], batch: Batch) -> Iterator[tuple[OpModule, OpModule, Any, Any]]:
    """Both chains run forward and backward, then the pairs of modules with their carries."""
    carries: list[list[Carry]] = []
    for chain in (whole, parts):
        carry: Carry = {}
        carries.append([])
        for module in chain:
            carry = module(carry, batch)
            carries[-1].append({n: t.detach().clone() for n, t in carry.items()})
        carry["loss"].backward()
    yield from zip(whole, parts, *carries, strict=True)

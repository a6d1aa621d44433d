"""What the server that forks the ranks and planners of tests has imported and loaded beforehand: each of hundreds would do it again."""

from __future__ import annotations

from importlib import import_module

_IMPORTED = (
    "torch._dynamo", "torch.utils.tensorboard", "penstock.adapting.watching", "penstock.adapting.deciding", "penstock.batching.planned",
    "penstock.data.planners", "penstock.models.resnet", "penstock.models.vgg", "penstock.models.modules.attention",
    "penstock.models.modules.convolution", "penstock.models.modules.loss", "penstock.models.modules.transformer", "penstock.plans.spec",
    "penstock.stores.redis", "penstock.stores.tcp", "checkpoint_jobs", "generation_jobs", "moving_jobs", "sharding_jobs", "worker_jobs",
    "hypothesis", "pytest", "transformers.modeling_utils",
)  # fmt: skip
_KERNELS = ("penstock.timing.clock", "penstock.timing.event_clock", "penstock.batching.kernels")
"""With which planners, and ranks that plan for themselves, plan; to load one takes far longer than to call it."""

for _name in _IMPORTED:
    import_module(_name)
for _name in _KERNELS:
    import_module(_name).warm()

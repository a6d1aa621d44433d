"""Training in double precision, in which two orders of adding differ by 1e-16 instead of 1e-7: what is left is a mistake, not a rounding.

Nets with batch norm before ReLU need it to be compared at all: in fp32 a rounding moves some activation over a ReLU's kink within a few
steps, and batch norm spreads that over all samples, in one process as in many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from training_jobs import TrainedPrograms, train_programs

from penstock.models.modules.build import TORCH_DTYPES
from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.slices import DTYPES
from penstock.runtime.worker import Worker

__all__ = ["in_doubles", "train_in_doubles"]


@contextmanager
def in_doubles() -> Iterator[None]:
    """Whatever asks for fp32 gets doubles."""
    usual = torch.get_default_dtype()
    with (
        mock.patch.dict(TORCH_DTYPES, fp32=torch.float64),
        mock.patch.dict(DTYPES, fp32=torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(usual)


def train_in_doubles(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings) -> TrainedPrograms:
    """`train_programs` of a plan in fp32, in doubles."""
    with in_doubles():
        return train_programs(worker, plan, programs, settings)

"""A job for worker processes: train with buckets so small that many of them fill."""

from __future__ import annotations

from collections.abc import Sequence

from training_jobs import TrainedPrograms, train_programs

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.parallel import gradients
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.worker import Worker

__all__ = ["train_in_small_buckets"]


def train_in_small_buckets(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings, bucket_bytes: int
) -> TrainedPrograms:
    """Like `train_programs`, with another size of buckets."""
    usual, gradients.BUCKET_BYTES = gradients.BUCKET_BYTES, bucket_bytes
    try:
        return train_programs(worker, plan, programs, settings)
    finally:
        gradients.BUCKET_BYTES = usual

"""The torch side of `models`: one module per kind of op."""

from penstock.models.modules.backward import run_backward
from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch, Sequences, random_batch
from penstock.models.modules.build import TORCH_DTYPES, Chain, build_chain, build_op
from penstock.models.modules.parallel import TensorParallel

__all__ = [
    "TORCH_DTYPES", "Batch", "Carry", "Chain", "OpModule", "Sequences", "TensorParallel", "build_chain", "build_op", "random_batch",
    "run_backward",
]  # fmt: skip

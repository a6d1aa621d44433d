"""Models as chains of ops: a torch-free description for planning, torch modules (`models.modules`) for training."""

from penstock.models.catalog import model_names, resolve_model
from penstock.models.ops import Block, Model, Op, TensorSpec
from penstock.models.shapes import Shape

__all__ = ["Block", "Model", "Op", "Shape", "TensorSpec", "model_names", "resolve_model"]

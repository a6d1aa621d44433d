"""From what each op of a module did at several shapes to ops whose amounts are linear forms over the features of a micro-batch."""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.cutting.dividing import Styles
from penstock.models.modules.cutting.weights import WeightTable
from penstock.models.modules.traced_pass import AMOUNTS, TracedPass, storage_of
from penstock.models.ops import Collective, Op, Split, TensorSpec
from penstock.models.shapes import FEATURES, Form, Quantity, Shape

__all__ = ["PresentDivision", "TraceFit"]

TOLERANCE = 1e-2
"""A form may be off by this share of the whole model's amount before the user is told."""


@dataclass(frozen=True)
class PresentDivision:
    """The same of a module whose lists may be shorter, by the paths that parts have now."""

    styles: Styles
    limit: int

    def inside(self, unit: str) -> Styles:
        """Of the parts of a unit, by their names in it."""
        at = f"{unit}." if unit else ""
        here = {path: style for path, style in self.styles.items() if path == unit or path.startswith(at)}
        return {"" if path == unit else path.removeprefix(at): style for path, style in here.items()}


class TraceFit:
    """From what each op did at several shapes to ops with forms."""

    def __init__(
        self, name: str, dtype: str, runs: list[TracedPass], halves: list[TracedPass], divided: PresentDivision, shapes: list[Shape],
        basis: Sequence[str], weights: WeightTable,
    ) -> None:  # fmt: skip
        """`halves`: the same as one of two ranks runs it; none where the module is not divided."""
        self.name, self.dtype, self.runs, self.basis, self.weights = name, dtype, runs, basis, weights
        self.halves, self.divided = halves, divided
        self.columns = [FEATURES.index(feature) for feature in basis]
        self.rows = np.array([shape.features for shape in shapes], dtype=np.float64)[:, self.columns]
        self.carries = [list(handed) for handed in runs[0].handed]
        """The sites of each op's carry."""
        for index in range(len(self.carries)):
            self._add_held(index, runs)
            if halves:
                self._add_held(index, halves)

    def quantity(self, amount: str, index: int) -> Quantity:
        """One op's amount: what is half as much on one of two ranks is divided."""
        whole = self.form(amount, index, self.runs)
        if not self.halves or not self.divided.inside(_path(self.runs[0].names[index])):
            return Quantity(whole=whole)
        half = self.form(amount, index, self.halves)
        both = zip(whole.coefficients, half.coefficients, strict=True)
        split = Form(tuple(min(all_, max(0.0, 2 * (all_ - part))) for all_, part in both))
        return Quantity(whole + split * -1.0, split)

    def collectives(self, index: int) -> tuple[Collective, ...]:
        """What an op's ranks then run with each other."""
        of_each = [[one for one in run.collectives if one[0] == index] for run in self.halves]
        found = []
        for same in zip(*of_each, strict=True):
            _, kind, when, _ = same[0]
            found.append(Collective(kind, when, self.fitted(np.array([size for *_, size in same], dtype=np.float64))))  # type: ignore[arg-type]
        return tuple(found)

    def fitted(self, wanted: np.ndarray) -> Form:
        """The form without negative terms that is nearest to what was seen at each shape."""
        scale = self.rows.max(0)
        return Form.of(**dict(zip(self.basis, np.round(nnls(self.rows / scale, wanted)[0] / scale, 3).tolist(), strict=True)))

    def form(self, amount: str, index: int, runs: list[TracedPass]) -> Form:
        """The linear form of one op's amount; where there is none, the best without negative terms, and a warning if it matters."""
        wanted = np.array([run.segments[index].amounts[amount] for run in runs])
        if not wanted.any():
            return Form()
        scale = self.rows.max(0)
        found = np.linalg.lstsq(self.rows / scale, wanted, rcond=None)[0] / scale
        found = np.round(found * 2) / 2  # Amounts are whole numbers, or halves under a causal mask.
        if np.abs(self.rows @ found - wanted).max() > 1e-9 * wanted.max() or (found < 0).any():
            found = nnls(self.rows / scale, wanted)[0] / scale
            whole = np.array([sum(segment.amounts[amount] for segment in run.segments) for run in runs])
            off = (np.abs(self.rows @ found - wanted) / whole).max()
            if off > TOLERANCE and amount != "workspace":
                warnings.warn(f"trace of '{self.name}': {amount} of '{self.runs[0].names[index]}' is not linear in the shape; "
                              f"the description is off by up to {off:.1%} of the model's.", stacklevel=5)  # fmt: skip
        return Form.of(**dict(zip(self.basis, found.tolist(), strict=True)))

    def spec(self, index: int, site: Any, name: str) -> TensorSpec:
        """A carry tensor: which feature counts its elements. Where none does exactly, the smallest that suffices at every shape."""
        tensors = [run.handed[index][site] for run in self.runs]
        counts = np.array([x.numel() for x in tensors], dtype=np.float64)
        ratios = counts[:, None] / self.rows
        feature = next((f for f, ratio in zip(self.basis, ratios.T, strict=True) if np.ptp(ratio) == 0), "")
        if not feature:  # what is one for all samples, as a bias of positions is, counts most where there is one sample
            alone = ratios * self.rows[:, [self.basis.index("samples")]]
            feature = next((f for f, ratio in zip(self.basis, alone.T, strict=True) if np.ptp(ratio) == 0), "")
            ratios = alone if feature else ratios
        if not feature:
            worst = ratios.max(0)
            feature = self.basis[int((worst * self.rows).sum(0).argmin())]
        each = int(np.ceil(ratios[:, self.basis.index(feature)].max()))
        one = tensors[0]
        dtype = "compute" if one.dtype == TORCH_DTYPES[self.dtype] else "fp32" if one.is_floating_point() else "int64"
        return TensorSpec(name, (each,) if feature == "one" else (feature, each), dtype, one.requires_grad)

    def _add_held(self, index: int, runs: list[TracedPass]) -> None:
        """What an op keeps for its backward pass besides its carry, and the largest that it makes in passing."""
        segments = [run.segments[index] for run in runs]
        # The tensor that is largest at the last shape, so that its size is one form and not a maximum of several.
        largest = int(np.argmax(segments[-1].scratch)) if segments[-1].scratch else 0
        for segment, run in zip(segments, runs, strict=True):
            handed = {storage_of(x) for x in (*run.handed[index].values(), *(run.handed[index - 1].values() if index else ()))}
            segment.amounts["kept"] = sum(size for key, size in segment.saved.items() if key not in handed)
            segment.amounts["workspace"] = segment.scratch[largest] if largest < len(segment.scratch) else 0

    def ops(self) -> list[Op]:
        """The ops of the chain, each with a name of its own."""
        first = self.runs[0]
        named: dict[Any, str] = {}
        made: list[Op] = []
        for index, path in enumerate(first.names):
            before = dict(named)
            named = _names(first.handed[index], before, last=index == len(first.names) - 1)
            carry = tuple(self.spec(index, site, named[site]) for site in self.carries[index])
            made.append(self._op(index, path, carry, before, named))
        return made

    def _op(self, index: int, path: str, carry: tuple[TensorSpec, ...], named_before: dict[Any, str], named_after: dict[Any, str]) -> Op:
        first = self.runs[0]
        after = {storage_of(first.handed[index][site]): name for site, name in named_after.items()}
        before = {storage_of(first.handed[index - 1][site]): name for site, name in named_before.items()}
        segments = [run.segments[index] for run in self.runs]
        forms = {amount: self.quantity(amount, index) for amount in AMOUNTS}
        styles = self.divided.inside(_path(path)) if self.halves else {}
        saved = [key for key in segments[0].saved if key in before or key in after]
        split = Split(self.collectives(index), forms.pop("kept"), saves_in=tuple(sorted(before[key] for key in saved if key in before)),
                      saves_out=tuple(sorted(after[key] for key in saved if key not in before)))  # fmt: skip
        shared = [name for name in segments[0].parameters if first.first_use[name] < index]
        made = sorted(name for site, name in named_after.items() if site not in named_before)
        config: dict[str, Any] = {"made": made, **self.weights.config(index), **({"tp": styles} if styles else {})}
        if shared:
            weights = dict(first.owner.values())
            config["untied_parameters"] = sum(weights[name] for name in segments[0].parameters if name not in shared)
        config["measures"] = _digest(carry, forms, split)
        return Op(
            path, "traced", config, carry, **forms, backward_workspace=forms["parameters"] * TORCH_DTYPES[self.dtype].itemsize,
            splits=(split,), tp_limit=self.divided.limit if styles or not self.halves else 0, num_kernels=segments[0].num_kernels,
            tied_to=first.names[first.first_use[shared[0]]] if shared else "",
        )  # fmt: skip


def _path(name: str) -> str:
    """The path of a unit, given the name of an op."""
    return "" if name == "module" else name.partition("#")[0]


def _names(handed: dict[Any, torch.Tensor], before: dict[Any, str], last: bool) -> dict[Any, str]:
    """Names of a carry's tensors: those handed on keep theirs, the newest with a gradient is `hidden` (`output` at the end)."""
    names = {} if last else {site: before[site] for site in handed if site in before}
    fresh = [site for site in reversed(handed) if site not in names]
    for site in sorted(fresh, key=lambda site: not handed[site].requires_grad):
        choices = itertools.chain(["output" if last else "hidden"], (f"extra{n}" for n in itertools.count(1)))
        names[site] = next(choice for choice in choices if choice not in names.values())
    return {site: names[site] for site in handed}


def _digest(*parts: object) -> str:
    """What ops of equal cost have in common."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

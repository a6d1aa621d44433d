"""Tensors without values: what torch calls on them give, and what is remembered of that."""

from __future__ import annotations

import pytest
import torch

from penstock.models.modules.cutting.absent import Absent, NeedsValues


def test_an_absent_tensor_has_no_values() -> None:
    x = Absent(torch.empty(2, 3, device="meta"), torch.device("cpu"))
    assert isinstance(x @ x.T, Absent) and (x @ x.T).shape == (2, 2) and x.device.type == "cpu"
    assert "Absent((2, 3), torch.float32)" in repr(x)
    with pytest.raises(NeedsValues):
        x.sum().item()


def test_what_is_remembered_of_absent_tensors_is_what_was_asked() -> None:
    """Equal arguments of other types, strides or dtypes are other questions; what changes a tensor gives that very one."""
    x = Absent(torch.empty(2, 3, dtype=torch.long, device="meta"), torch.device("cpu"))
    for _ in range(2):
        assert [(x + n).dtype for n in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]
        assert (x.T.contiguous().stride(), x.contiguous().stride()) == ((2, 1), (3, 1))
        assert x.add_(1) is x and (x + torch.zeros(3)).dtype == torch.float32 and x.float().device.type == "cpu"
        with pytest.raises(NeedsValues):
            torch.zeros(2, 3).add_(x)

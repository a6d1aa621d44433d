"""From micro-batches to tensors: layouts, shares, shared rows, weights that sum to one over the global batch."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from runtime_cases import MODELS
from small_models import small_model
from training_jobs import RandomSource

from penstock.data.samples import Sample
from penstock.models.catalog import model_from_mapping
from penstock.models.micro_batch import MicroBatch
from penstock.models.modules import build_chain
from penstock.programs.instructions import Program
from penstock.runtime.source import load_share

CPU = torch.device("cpu")
ALL = ("inputs", "dec_inputs", "labels")


def program_of(*micros: MicroBatch, iteration: int = 0) -> Program:
    return Program(0, iteration, 0, 1, 1, sum(m.loss_tokens() for m in micros), sum(len(m.samples) for m in micros), (), micros, ())


class Counting:
    """Sample i has tokens i·100, i·100 + 1, …; labels one more; every second label counts."""

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        tokens = sample * 100 + np.arange(length)
        return Sample(tokens, tokens + 1, counted=np.arange(length) % 2 == 1)


def test_packed_samples_lie_end_to_end() -> None:
    micro = MicroBatch(0, (1, 2, 3), "packed", (2, 3, 1), counted=(1, 1, 0), bounds={2: (0, 1, 3)})
    batch = load_share(Counting(), program_of(micro), micro, (1, 3), ALL, CPU, 0)
    assert batch.own is not None and batch.labels is not None and batch.weights is not None
    assert batch.own.ids.tolist() == [200, 201, 202, 300] and batch.own.lengths == (3, 1)
    assert batch.labels.tolist() == [201, 202, 203, 301]
    assert batch.weights.tolist() == [0.0, 0.5, 0.0, 0.0]
    assert batch.own.samples.tolist() == [2, 3] and batch.own.positions.tolist() == [0, 1, 2, 0]


def test_padded_rows_end_in_nothing_that_counts() -> None:
    micro = MicroBatch(0, (1, 2), "padded", (2, 3), row_length=4, counted=(1, 1))
    batch = load_share(Counting(), program_of(micro), micro, (0, 2), ALL, CPU, 0)
    assert batch.own is not None and batch.weights is not None
    assert batch.own.ids.view(2, 4).tolist() == [[100, 101, 0, 0], [200, 201, 202, 0]]
    assert batch.weights.view(2, 4).tolist() == [[0.0, 0.5, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0]]


def test_filler_lies_behind_packed_samples_and_counts_for_nothing() -> None:
    """No piece of it is longer than a sample, so that no model has too few positions for it."""
    micro = MicroBatch(0, (1, 2), "packed", (2, 3), row_length=12, counted=(1, 1))
    batch = load_share(Counting(), program_of(micro), micro, (0, 2), ALL, CPU, 0)
    assert batch.own is not None and batch.labels is not None and batch.weights is not None
    assert batch.own.ids.tolist() == [100, 101, 200, 201, 202] + 7 * [0] and batch.own.lengths == (2, 3, 3, 3, 1, 0, 0, 0)
    assert batch.own.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert batch.weights.tolist() == [0.0, 0.5, 0.0, 0.5, 0.0] + 7 * [0.0] and len(batch.labels) == 12


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_filler_changes_neither_loss_nor_gradients(family: str) -> None:
    model = small_model(family)
    micro = MicroBatch(0, (0, 1, 2), "packed", (5, 2, 7))
    found = []
    for tokens in (0, 24):
        chain = build_chain(model)
        batch = load_share(RandomSource(model), program_of(micro), msgspec.structs.replace(micro, row_length=tokens), (0, 3), ALL, CPU, 0)
        chain(batch)["loss"].backward()
        found.append([chain(batch)["loss"].detach(), *(own.grad for own in chain.parameters())])
    assert all(torch.allclose(plain, filled, rtol=1e-5, atol=1e-7) for plain, filled in zip(*found, strict=True))


def test_samples_that_share_a_row() -> None:
    micro = MicroBatch(0, (1, 2, 3), "padded", (2, 1, 3), row_length=4, row_sizes=(2, 1), counted=(1, 0, 1), bounds={2: (0, 2, 3)})
    batch = load_share(Counting(), program_of(micro), micro, (0, 3), ALL, CPU, 0)
    assert batch.own is not None
    assert batch.own.ids.view(2, 4).tolist() == [[100, 101, 200, 0], [300, 301, 302, 0]] and batch.own.lengths == (3, 3)
    last = load_share(Counting(), program_of(micro), micro, (2, 3), ALL, CPU, 0)
    assert last.own is not None and last.own.ids.tolist() == [300, 301, 302, 0]


def test_what_is_not_read_is_not_fetched() -> None:
    class Refusing:
        def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
            raise AssertionError("nobody reads it")

    micro = MicroBatch(0, (1, 2), "padded", (2, 3), row_length=4)
    batch = load_share(Refusing(), program_of(micro), micro, (0, 2), (), CPU, 0)
    assert batch.own is not None and batch.own.ids.numel() == 8 and batch.labels is None


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_weights_of_all_shares_sum_to_one(family: str) -> None:
    model = small_model(family)
    dec = (2, 3, 1, 4) if family == "t5" else ()
    micros = [
        MicroBatch(0, (4, 5, 6, 7), "padded", (2, 3, 4, 5), dec, 6, 4 if dec else 0, bounds={3: (0, 1, 3, 4)}),
        MicroBatch(1, (0, 1, 2, 3), "padded", (1, 1, 1, 9), dec, 9, 4 if dec else 0, bounds={3: (0, 0, 2, 4)}),
    ]
    program = program_of(*micros)
    batches = [
        load_share(RandomSource(model), program, micro, pair, ALL, CPU, 0)
        for micro in micros
        for pair in pairwise(micro.bounds[3])
        if pair[0] < pair[1]
    ]
    assert sum(batch.weights.sum().item() for batch in batches if batch.weights is not None) == pytest.approx(1.0)
    assert (sum(batch.sample_weights.sum().item() for batch in batches if batch.sample_weights is not None) or 1.0) == pytest.approx(1.0)
    assert all((batch.next_sentence is not None) == (family == "bert") for batch in batches)


def test_images_weigh_alike_whatever_their_micro_batch() -> None:
    micros = [MicroBatch(0, (0, 1, 2), "padded", bounds={2: (0, 1, 3)}), MicroBatch(1, (3, 4, 5, 6, 7), "padded", bounds={2: (0, 3, 5)})]
    program, source = program_of(*micros), RandomSource(model_from_mapping(MODELS["vgg"] | {"dtype": "fp32"}, "test", "vgg"))
    batches = [load_share(source, program, micro, pair, ALL, CPU, 0) for micro in micros for pair in pairwise(micro.bounds[2])]
    assert torch.cat([batch.weights for batch in batches]).tolist() == [pytest.approx(1 / 8)] * 8


@pytest.mark.parametrize("training", [True, False])
def test_what_dropout_depends_on(training: bool) -> None:
    micro = MicroBatch(0, (1,), "packed", (2,), counted=(1,))
    program = msgspec.structs.replace(program_of(micro, iteration=7), training=training)
    batch = load_share(Counting(), program, micro, (0, 1), ALL, CPU, 5)
    assert (batch.step, batch.seed, batch.training) == (7, 5, training)


def test_a_count_that_differs_from_the_program_is_told() -> None:
    micro = MicroBatch(0, (1,), "packed", (4,), counted=(3,))
    with pytest.raises(ValueError, match=r"2 labels of samples \(1,\) count in the loss, the program says 3"):
        load_share(Counting(), program_of(micro), micro, (0, 1), ALL, CPU, 0)


def test_random_samples_depend_on_seed_iteration_and_id_alone() -> None:
    model = small_model("t5")
    one, again = (RandomSource(model, 3).sample(1, 2, 5, 4) for _ in range(2))
    assert all(np.array_equal(getattr(one, name), getattr(again, name)) for name in ("inputs", "labels", "dec_inputs"))
    for seed, iteration, sample in ((4, 1, 2), (3, 0, 2), (3, 1, 1)):
        assert not np.array_equal(RandomSource(model, seed).sample(iteration, sample, 5, 4).inputs, one.inputs)

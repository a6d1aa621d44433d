"""Samples end to end in one row: each as if it were alone, with attention of ours and of torch; dropout that nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import InputError
from penstock.models.modules.batch import Batch, Sequences
from penstock.models.modules.cutting.describing import describe
from penstock.models.modules.cutting.origins import made_of
from penstock.models.modules.cutting.packing import Keeper, _Calls, attention_dropout, has_dropout, kept, packs, sample_attention
from penstock.models.modules.cutting.seen import SeenMicroBatch, logits_loss, seen
from penstock.models.modules.cutting.skipping import Skipping
from penstock.models.modules.cutting.transformers_models import made_by_transformers, use_our_attention
from penstock.runtime.parallel.module_chain import CutModule
from tests.module_zoo import VOCAB, LongSkips, PlainGpt, example, make


@pytest.mark.parametrize("name", ["llama", "mistral", "exaone4", "phimoe", "llama4", "gemma2", "gemma3", "phi", "mixtral", "bert"])
def test_our_attention_is_theirs_and_packs(name: str) -> None:
    """Windows, of all layers or some, said by layers or by the config alone, chunks, capped scores, attention to both sides; sizes are
    small enough for all of it to matter."""
    kwargs = {"input_ids": example(name, 2, 20)["input_ids"]}
    wanted = make(name, attn_implementation="eager")(**kwargs).logits
    module = make(name)
    use_our_attention(module)
    assert (module(**kwargs).logits - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert packs(module, logits_loss, VOCAB) == (True, True)


def test_models_of_images_keep_their_attention(tmp_path: Path) -> None:
    """Swin adds a learnt bias of places, and masks shifted windows."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=5,
        architectures=["SwinForImageClassification"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    ours, theirs = made_by_transformers(str(tmp_path), 0).module.eval(), transformers.SwinForImageClassification(config).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, 32, 32)
    assert (ours(images).logits - theirs(images).logits).abs().max() <= 1e-6


@pytest.mark.parametrize("name", ["doge", "glm-dsa"])
def test_layers_that_choose_what_is_seen_keep_their_attention(name: str) -> None:
    """By a mask that they make of one that transformers made, or of indices."""
    kwargs = {"input_ids": example(name, 2, 20)["input_ids"]}
    module = make(name)
    use_our_attention(module)
    assert (module(**kwargs).logits - make(name)(**kwargs).logits).abs().max() == 0.0
    with pytest.raises(InputError, match="Identity makes a mask of its own"):
        sample_attention(nn.Identity(), *torch.ones(3, 1, 1, 4, 8), torch.ones(4, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 5), (False, None)])
def test_samples_end_to_end_are_attended_to_at_once_on_a_gpu(causal: bool, window: int | None) -> None:
    batch = _packed_batch((7, 12, 1, 30), "cuda")
    query, key, value = (torch.randn(1, heads, 50, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    found = []
    for micro_batch in (seen(batch), replace(seen(batch), edges=None)):
        own = [x.clone().requires_grad_() for x in (query, key, value)]
        with kept(micro_batch):
            out = sample_attention(nn.Identity(), *own, None, sliding_window=window, is_causal=causal)[0]
        out.square().sum().backward()
        found.append([out, *(x.grad for x in own)])
    for one, other in zip(*found, strict=True):
        assert (one.float() - other.float()).norm() < 2e-2 * other.float().norm()


def test_where_samples_lie_is_known_on_both_sides() -> None:
    micro_batch = seen(_packed_batch((7, 12, 1, 30), "cpu"))
    assert micro_batch.bounds == ((0, 7), (7, 19), (19, 20), (20, 50)) and micro_batch.longest == 30
    assert micro_batch.edges is not None and micro_batch.edges.tolist() == [0, 7, 19, 20, 50] and micro_batch.edges.dtype == torch.int32


def _packed_batch(lengths: tuple[int, ...], device: str) -> Batch:
    ids = torch.ones(sum(lengths), dtype=torch.long, device=device)
    own = Sequences(ids, lengths, "packed", max(lengths), torch.arange(len(lengths), device=device))
    return Batch(labels=ids, weights=torch.ones(len(ids), device=device), own=own)


def test_attention_of_torch_is_kept_inside_samples() -> None:
    assert packs(PlainGpt(), logits_loss, VOCAB) == (True, True)
    assert packs(LongSkips(), logits_loss, VOCAB) == (True, False), "a mask of its own"
    assert packs(make("qwen3"), logits_loss, VOCAB)[0], "a mask of its own, as transformers makes it"


def test_what_first_values_of_zero_hide_is_seen() -> None:
    """Training moves them, and samples would see each other from the second step on."""
    net = LongSkips()
    nn.init.zeros_(net.head.weight)
    assert packs(net, logits_loss, VOCAB) == (True, False), "a mask of its own, behind a head of zeros"
    assert not net.head.weight.any(), "as it was"
    gpt, without = PlainGpt(), lambda module, one: one.loss(module(one.ids))
    for p in (gpt.places.weight, *(block.out.weight for block in gpt.blocks)):
        nn.init.constant_(p, 1e-9)
    assert packs(gpt, without, VOCAB) == (True, False), "places are counted through the row"


def test_attention_that_hardly_moves_the_loss_yet_is_seen() -> None:
    """Bloom calls products of its own, and begins with weights of 0.02."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    assert packs(transformers.BloomForCausalLM(config), logits_loss, 300) == (True, False)


class FarBack(nn.Module):
    """Sees what was so many tokens before, and nothing between. Its table of places ends soon."""

    def __init__(self, back: int, places: int = 200) -> None:
        super().__init__()
        self.back, self.words, self.places = back, nn.Embedding(VOCAB, 16), nn.Embedding(places, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(positions)
        before = nn.functional.pad(x, (0, 0, self.back, 0))[:, : x.shape[1]]
        return self.head(x + before.tanh())  # type: ignore[no-any-return]


def test_what_looks_far_back_is_seen() -> None:
    assert packs(FarBack(50), logits_loss, VOCAB) == (True, False)
    assert packs(FarBack(200), logits_loss, VOCAB) == (True, True), "further than any sample that is tried"
    assert packs(FarBack(200, places=20), logits_loss, VOCAB) == (True, True), "longer samples are none of this module's"


@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert", "MPNet"])
def test_positions_begin_where_the_model_begins_them(kind: str) -> None:
    """Those of RoBERTa and its like behind the row of padding: what was trained before is found under other positions otherwise."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, max_position_embeddings=20,
        pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    module = getattr(transformers, f"{kind}ForMaskedLM")(config).eval()
    ids = torch.arange(2, 14).view(1, 12)
    one = SeenMicroBatch(ids, ids, torch.full(ids.shape, 1 / 12), torch.arange(12)[None])
    wanted = nn.functional.cross_entropy(module(ids).logits.flatten(0, 1), ids.flatten())
    assert logits_loss(module, one).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_what_counts_masked_tokens_is_seen() -> None:
    """ESM scales a row by how many of its tokens are masked."""
    transformers = pytest.importorskip("transformers")
    config = transformers.EsmConfig(
        vocab_size=900, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, position_embedding_type="rotary", token_dropout=True, mask_token_id=32, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.EsmForMaskedLM(config)
    use_our_attention(module)
    assert packs(module, logits_loss, 900, stays_inside=True) == (True, False)


def test_a_loss_that_is_not_weighed_is_seen() -> None:
    assert packs(PlainGpt(), lambda module, one: logits_loss(module, one) / one.ids.numel(), VOCAB)[0] is False


def batch_of(samples: Sequence[int], layout: str) -> Batch:
    lengths = {0: 7, 1: 3, 2: 9, 3: 5}
    sizes = tuple(lengths[sample] for sample in samples)
    width = max(sizes)
    ids, weights = [], []
    for sample, size in zip(samples, sizes, strict=True):
        own = torch.arange(size) * (sample + 3) % VOCAB
        room = 0 if layout == "packed" else width - size
        ids.append(nn.functional.pad(own, (0, room)))
        weights.append(nn.functional.pad(torch.full((size,), 1 / 24), (0, room)))
    flat = torch.cat(ids)
    own = Sequences(flat, sizes, layout, width, torch.tensor(samples))  # type: ignore[arg-type]
    return Batch(flat, torch.cat(weights), own, step=4, seed=1)


def total(module: nn.Module, groups: list[list[int]], layout: str, cut: int, recompute: Sequence[int] = ()) -> tuple[float, torch.Tensor]:
    chain = Skipping(module)
    first = seen(batch_of([0, 1], "padded"))
    chain.trace(lambda own: logits_loss(own, first))
    module.zero_grad()
    found = 0.0
    for samples in groups:
        one = seen(batch_of(samples, layout))
        with kept(one):
            sent = chain.run(lambda own, one=one: logits_loss(own, one), 0, cut, {}, recompute, through=Keeper(one))  # type: ignore[misc]
            leaves = {site: x.detach().requires_grad_() for site, x in sent.items()}
            loss = chain.run(
                lambda own, one=one: logits_loss(own, one), cut, len(chain.calls), leaves, recompute, through=Keeper(one)  # type: ignore[misc]
            )
        loss.backward()
        torch.autograd.backward([sent[site] for site in leaves], [leaf.grad for leaf in leaves.values()])
        found += loss.item()
    chain.close()
    return found, torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def test_dropout_is_the_same_under_any_cut_packing_and_recomputation() -> None:
    torch.manual_seed(0)
    module = PlainGpt(dropout=0.2)
    assert has_dropout(module) and not has_dropout(PlainGpt())
    loss, gradients = total(module, [[0], [1], [2], [3]], "padded", 1)
    for groups, layout, cut, recompute in (
        ([[0, 1], [2, 3]], "padded", 3, ()), ([[3, 0], [2, 1]], "packed", 4, ()), ([[0, 1, 2, 3]], "packed", 2, range(10)),
    ):  # fmt: skip
        other, found = total(module, groups, layout, cut, recompute)
        assert other == pytest.approx(loss, rel=1e-5)
        assert (found - gradients).abs().max() <= 1e-5 * gradients.abs().max()
    module.eval()
    assert abs(total(module, [[0], [1], [2], [3]], "padded", 1)[0] - loss) > 1e-3 * loss


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dropout_without_a_part_of_its_own_is_seen(dropout: float) -> None:
    """Its masks too depend on seed, step, sample and place alone."""

    class Dropping(nn.Sequential):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids)  # type: ignore[no-any-return]

    block = nn.Linear(8, 8)
    block.forward = lambda x: nn.functional.dropout(x, dropout, block.training) + x  # type: ignore[method-assign]
    made = made_of(Dropping(nn.Embedding(VOCAB, 8), block, nn.Linear(8, VOCAB)))
    assert not has_dropout(made.module)
    assert CutModule(describe(made), made, torch.device("cpu")).drops == (dropout > 0)


class Recomputing(PlainGpt):
    """Recomputes its blocks by itself: around them, or each within."""

    reentrant, around = True, True

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.words(ids) + self.places(torch.zeros_like(ids) if positions is None else positions))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.around else block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [False, True])
def test_what_a_module_recomputes_itself_changes_nothing(reentrant: bool, around: bool) -> None:
    torch.manual_seed(0)
    module = Recomputing(dropout=0.3)
    module.reentrant, module.around = reentrant, around
    for block in () if around else module.blocks:
        inside: Any = block.forward
        block.forward = lambda x, inside=inside: checkpoint(inside, x, use_reentrant=reentrant)  # type: ignore[method-assign,misc]
    plain = PlainGpt(dropout=0.3)
    plain.load_state_dict(module.state_dict())
    loss, gradient = total(plain, [[0, 1], [2, 3]], "packed", 3)
    for layout, recompute in (("packed", ()), ("packed", range(8)), ("padded", (1, 3))):
        other, found = total(module, [[0, 1], [2, 3]], layout, 3, recompute)  # type: ignore[arg-type]
        assert abs(other - loss) <= 1e-6 * loss and (found - gradient).abs().max() <= 1e-5 * gradient.abs().max()
    assert torch.utils.checkpoint.checkpoint(torch.neg, torch.ones(1, requires_grad=True), use_reentrant=True).grad_fn is not None
    assert any("recomputes itself" in note for note in describe(made_of(module)).notes)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_of_encoder_decoders_drops_nothing(attention: str) -> None:
    """T5 has one number for dropout of attention and of hidden states; what is left depends on no generator."""
    pytest.importorskip("transformers")
    module, one = make("t5", dropout_rate=0.3, attn_implementation=attention).train(), seen(batch_of([0, 1], "padded"))
    one.decoder_ids, one.dec_keys = one.ids.repeat(1, 4), torch.arange(8 * one.ids.numel())[::2]  # as many as heads × own positions
    one.labels, one.weights = one.decoder_ids, torch.ones(one.decoder_ids.shape)
    chain = Skipping(module)
    chain.trace(lambda own: logits_loss(own, one))
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(chain.run(lambda own: logits_loss(own, one), 0, len(chain.calls), {}, through=Keeper(one)).item())
    module.eval()
    assert attention_dropout(module) == 0.3 and has_dropout(nn.MultiheadAttention(4, 2, dropout=0.1))
    assert found[0] == found[1] and abs(chain.run(lambda own: logits_loss(own, one), 0, len(chain.calls), {}) - found[0]) > 1e-3 * found[0]


def test_torchs_own_heads_drop_nothing() -> None:
    heads, x = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).train(), torch.randn(1, 5, 8)
    one = seen(batch_of([3], "padded"))
    keeper, wanted = Keeper(one), heads.eval()(x, x, x, need_weights=False)[0]
    with _Calls(keeper):
        assert torch.allclose(heads.train()(x, x, x, need_weights=False)[0], wanted, atol=1e-6)

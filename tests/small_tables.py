"""Tables in the formats of Aceso, FASOP and DynaPipe, made here: times from peak rates of our own device records, sizes from formulas.

Nothing in them was measured or copied, so that every reader, search, export and figure can be tested in a fresh clone.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from penstock.clusters import DEVICES
from penstock.clusters.hardware import Device

ACESO_HEADER = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
_MB, _V100 = 2**20, DEVICES["v100-32gb"]
_LAUNCH_S = 5e-6


class SmallOp(NamedTuple):
    """An op of one sample: arithmetic, and tensors in MB; what tensor parallelism divides is divided by it."""

    name: str
    flops: float
    input_mb: float
    output_mb: float
    weight_mb: float
    divided: bool = True


def roofline_s(flops: float, moved_bytes: float, device: Device) -> float:
    """The longer of half the peak of arithmetic and of memory, and a launch: not `costs.roofline`, whose calibration would change tables
    that tests compare with."""
    assert device.fp16_flops_per_s is not None
    return _LAUNCH_S + max(flops / (0.5 * device.fp16_flops_per_s), moved_bytes / device.memory_bandwidth_bytes_per_s)


def _transformer_layer(prefix: str, suffix: str, tokens: int, keys: int, hidden: int, first: str) -> Iterator[SmallOp]:
    """Norm, attention, and the dropout behind it."""
    state, square, scores = tokens * hidden * 2 / _MB, hidden * hidden * 2 / _MB, 8 * tokens * keys * 2 / _MB
    gemm, attention = 2 * tokens * hidden * hidden, 2 * tokens * keys * hidden
    yield SmallOp(f"{prefix}-{first}-layernorm", 10 * tokens * hidden, state, state, 0.01, False)
    yield SmallOp(f"{prefix}-attention-qkv{suffix}", 3 * gemm, state, 3 * state, 3 * square)
    yield SmallOp(f"{prefix}-attention-score{suffix}", attention, 3 * state, scores, 0)
    yield SmallOp(f"{prefix}-attention-softmax{suffix}", 8 * tokens * keys, scores, scores, 0)
    yield SmallOp(f"{prefix}-attention-dropout{suffix}", 8 * tokens * keys, scores, scores, 0)
    yield SmallOp(f"{prefix}-attention-context{suffix}", attention, scores, state, 0)
    yield SmallOp(f"{prefix}-attention-dense{suffix}", gemm, state, state, square)
    yield SmallOp(f"{prefix}-post-attention-dropout{suffix}", tokens * hidden, state, state, 0, False)


def _mlp(prefix: str, tokens: int, hidden: int, norm: str) -> Iterator[SmallOp]:
    state, square, gemm = tokens * hidden * 2 / _MB, hidden * hidden * 2 / _MB, 2 * tokens * hidden * hidden
    yield SmallOp(f"{prefix}-{norm}-layernorm", 10 * tokens * hidden, state, state, 0.01, False)
    yield SmallOp(f"{prefix}-MLP-GEMM-1", 4 * gemm, state, 4 * state, 4 * square)
    yield SmallOp(f"{prefix}-MLP-gelu", 32 * tokens * hidden, 4 * state, 4 * state, 0)
    yield SmallOp(f"{prefix}-MLP-GEMM-2", 4 * gemm, 4 * state, state, 4 * square)
    yield SmallOp(f"{prefix}-post-MLP-dropout", tokens * hidden, state, state, 0, False)


def _outer(name: str, tokens: int, hidden: int, flops: float = 0.0, weight_mb: float = 0.0) -> SmallOp:
    state = tokens * hidden * 2 / _MB
    return SmallOp(name, flops or tokens * hidden, state, state, weight_mb, weight_mb > 0)


def _gpt(tokens: int = 2048, hidden: int = 1024, vocab: int = 16_384) -> Iterator[SmallOp]:
    yield _outer("encoder-embedding", tokens, hidden, weight_mb=vocab * hidden * 2 / _MB)
    yield from _transformer_layer("enc", "", tokens, tokens, hidden, "1st")
    yield from _mlp("enc", tokens, hidden, "2nd")
    yield _outer("final-layernorm", tokens, hidden)
    yield _outer("gpt-post-process", tokens, hidden, 2 * tokens * hidden * vocab)


def _t5(tokens: int = 2048, answer: int = 512, hidden: int = 1024, vocab: int = 16_384) -> Iterator[SmallOp]:
    yield _outer("encoder-embedding", tokens, hidden, weight_mb=vocab * hidden * 2 / _MB)
    yield from _transformer_layer("enc", "", tokens, tokens, hidden, "1st")
    yield from _mlp("enc", tokens, hidden, "2nd")
    yield _outer("enc-final-layernorm", tokens, hidden)
    yield _outer("decoder-embedding", answer, hidden, weight_mb=vocab * hidden * 2 / _MB)
    yield from _transformer_layer("dec", "-1", answer, answer, hidden, "1st")
    yield from _transformer_layer("dec", "-2", answer, tokens, hidden, "2nd")
    yield from _mlp("dec", answer, hidden, "3rd")
    yield _outer("dec-final-layernorm", answer, hidden)
    yield _outer("t5-post-process", answer, hidden, 2 * answer * hidden * vocab)


def _resnet(width: int = 128) -> Iterator[SmallOp]:
    """The ops of a ResNet-50, four groups of 3, 4, 6 and 3 residual blocks."""

    def conv(name: str, before: int, after: int, side: int, kernel: int = 1) -> SmallOp:
        weights, pixels = before * after * kernel * kernel, side * side
        return SmallOp(name, 2 * weights * pixels, before * pixels * 4 / _MB, after * pixels * 4 / _MB, weights * 4 / _MB)

    def pointwise(name: str, channels: int, side: int) -> SmallOp:
        size = channels * side * side
        return SmallOp(name, 4 * size, size * 4 / _MB, size * 4 / _MB, 0.001, False)

    yield conv("conv1", 3, width, 112, 7)
    yield from (pointwise(name, width, side) for name, side in (("bn1", 112), ("relu1", 112), ("maxpool", 56)))
    for group, blocks in enumerate((3, 4, 6, 3)):
        side, wide = 56 >> group, width << group
        for block in range(blocks):
            at = f"block-{group}-{block}"
            for index, kernel in enumerate((1, 3, 1), 1):
                yield conv(f"{at}-conv{index}", wide, wide, side, kernel)
                yield pointwise(f"{at}-bn{index}", wide, side)
            yield conv(f"{at}-downsample", wide, wide, side)
            yield pointwise(f"{at}-relu", wide, side)
    yield pointwise("avgpool", width << 3, 7)
    yield conv("fc", width << 3, 1000, 1)


_FAMILIES = {"gpt": _gpt, "t5": _t5, "resnet": _resnet}


def _aceso_row(op: SmallOp, samples: int, tp: int, algo: int) -> tuple[str, list[float]]:
    ranks = tp if op.divided else 1
    share = samples / ranks
    moved = (op.input_mb + op.output_mb) * share * _MB + op.weight_mb / ranks * _MB
    again = (1.02 if op.divided and tp > 1 else 0.999) if algo else 1.0  # an op without a second split was only measured twice
    forward_us = roofline_s(op.flops * share, moved, _V100) * 1e6 * again
    kept = op.output_mb * share
    return op.name, [forward_us, 2 * forward_us, op.input_mb * samples, op.output_mb * samples, op.weight_mb / ranks, kept, kept, kept]


def aceso_tables(folder: Path, models: Sequence[str], sizes: Sequence[int] = (1, 2, 4), tps: Sequence[int] = (1, 2, 4)) -> Path:
    """A folder as Aceso's profiler writes it: ops of these models, collectives of the sizes that occur, bandwidths of messages."""
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        ops, occurring = list(_FAMILIES[model.split("_")[0]]()), {0}
        for samples, tp, algo in product(sizes, tps, (0, 1)):
            rows = [_aceso_row(op, samples, tp, algo) for op in ops]
            occurring |= {int(f"{values[2]:.0f}") for _, values in rows}
            lines = [f"{name},{','.join(f'{value:.3f}' for value in values)}" for name, values in rows]
            (folder / f"{model}_mbs{samples}_tp{tp}_algo{algo}.csv").write_text("\n".join([ACESO_HEADER, *lines]) + "\n")
        for kind, gpus in product(("all_gather", "all_reduce", "reduce_scatter", "all_to_all"), (2, 4, 8)):
            times = [
                f"{size},{0.02 + size * _MB / _V100.intra.bandwidth_bytes_per_s * 1e3 * (gpus - 1) / gpus:.3f}"
                for size in sorted(occurring)
            ]
            (folder / f"prim_{model}_{kind}_{gpus}gpus.csv").write_text("\n".join(["data_size(MB),time(ms)", *times]) + "\n")
    powers = [2**n for n in range(11)]
    for name, top in (("intra", 40), ("inter", 10)):
        speeds = (f"{top * size / (size + 4):.2f}" for size in powers)
        (folder / f"p2p_{name}_node.csv").write_text(f"{','.join(map(str, powers))}\n{', '.join(speeds)}\n")
    return folder


DYNAPIPE_HEADER = (
    "tp,recompute,component,micro_batch_size,enc_or_input_seqlen,dec_seqlen,fw_ms,bw_ms,stored_activation_mb,peak_activation_mb"
)
_LENGTHS = tuple(2**n for n in range(4, 12))
_MODES = {"none": (2.0, 34.0), "selective": (2.1, 20.0), "full": (3.0, 2.0)}
"""Backward times of a forward, and bytes kept of each element of the state."""


def dynapipe_layer(hidden: int, ffn: int, samples: int, tokens: int, keys: int, tp: int, mode: str) -> tuple[float, float, float, float]:
    """Milliseconds forward and backward, MB stored and at the peak of one layer."""
    backward, kept = _MODES[mode]
    flops = samples * tokens * (8 * hidden * hidden + 4 * hidden * ffn + 4 * hidden * keys) / tp
    forward = roofline_s(flops, 40 * samples * tokens * hidden / tp, DEVICES["a100-40gb"]) * 1e3
    squares = 5 * 16 * samples * tokens * keys / tp if mode == "none" else 0.0
    stored = (samples * tokens * hidden * kept / tp + squares) / 1e6
    return forward, forward * backward, stored, stored + samples * tokens * ffn * 4 / tp / 1e6


def dynapipe_points(model: str, sizes: Sequence[int]) -> Iterator[tuple[int, str, str, int, int, int, tuple[float, float, float, float]]]:
    """Every profiled point of a cost model: tp, mode, component, micro-batch, lengths, and its four costs."""
    hidden, ffn = {"gpt_6.7b": (4096, 16_384), "t5_11b": (1024, 8192)}[model]
    for tp, mode, samples, enc in product((1, 2, 4), _MODES, sizes, _LENGTHS):
        yield tp, mode, "encoder", samples, enc, 0, dynapipe_layer(hidden, ffn, samples, enc, enc, tp, mode)
        head = roofline_s(2 * samples * enc * hidden * 32_000 / tp, samples * enc * 64_000 / tp, DEVICES["a100-40gb"]) * 1e3
        yield tp, mode, "postprocess", samples, enc, 0, (head, 2 * head, 0.0, 0.0)
        for dec in _LENGTHS if model.startswith("t5") else ():
            yield tp, mode, "decoder", samples, enc, dec, dynapipe_layer(hidden, ffn, samples, dec, dec + enc, tp, mode)


def dynapipe_tables(folder: Path, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Path:
    """A folder of the two models of DynaPipe with one configuration of each."""
    folder.mkdir(parents=True, exist_ok=True)
    for model, layer_mb in (("gpt_6.7b", 400.0), ("t5_11b", 200.0)):
        lines = [
            f"{tp},{mode},{component},{samples},{enc},{dec or ''},{costs[0]:.4f},{costs[1]:.4f},"
            + (f"{costs[2]:.4f},{costs[3]:.4f}" if component != "postprocess" else ",")
            for tp, mode, component, samples, enc, dec, costs in dynapipe_points(model, sizes)
        ]
        (folder / f"{model}_cost_model.csv").write_text("\n".join([DYNAPIPE_HEADER, *lines]) + "\n")
        state = [
            f"{tp},{mode},{component},{layer_mb * share / tp}"
            for tp, mode, (component, share) in product((1, 2, 4), _MODES, (("embedding", 0.6), ("encoder", 1.0), ("decoder", 1.3)))
        ]
        (folder / f"{model}_model_state.csv").write_text("\n".join(["tp,recompute,component,fp16_param_mb_per_layer", *state]) + "\n")
    common = {"gpus_per_node": 8, "intra_node_gbit_per_s": 2400, "inter_node_gbit_per_s": 100}
    configs = {
        "gptA": {"model": "gpt", "layers": 32, "tp": 1, "pp": 4, "dp": 2, "zero": 1, "mem": 36_000},
        "t5C": {"model": "t5", "layers": 24, "tp": 2, "pp": 4, "dp": 1, "zero": 1, "mem": 36_000},
        "t5D": {"model": "t5", "layers": 24, "tp": 4, "pp": 2, "dp": 1, "zero": 1, "mem": 36_000},
    }
    (folder / "configs.json").write_text(json.dumps({"_common": common, "configs": configs}))
    return folder


def dynapipe_pickle(path: Path, model: str, sizes: Sequence[int] = (1, 2, 4)) -> Path:
    """The same cost model as DynaPipe saves it: dicts in dicts, each (tp, recompute) a pickle of its own."""
    saved: dict[tuple[int, str], bytes] = {}
    points = list(dynapipe_points(model, sizes))
    for tp, mode in dict.fromkeys(point[:2] for point in points):
        times, stored, peak, best = (dict[Any, Any]() for _ in range(4))
        for _, _, component, samples, enc, dec, costs in (point for point in points if point[:2] == (tp, mode)):
            lengths = (enc, dec) if component == "decoder" else enc
            for way, cost in zip(("forward", "backward"), costs[:2], strict=True):
                times.setdefault((component, way), defaultdict(list))[lengths].append((samples, cost, samples * enc / cost))
                best.setdefault((component, way), defaultdict(float))[lengths] = samples * enc / cost
            if component != "postprocess":
                stored.setdefault(component, defaultdict(list))[lengths].append((samples, costs[2]))
                peak.setdefault(component, defaultdict(list))[lengths].append((samples, costs[3]))
        weights = {"embedding": 240.0 / tp, "encoder": 400.0 / tp, "decoder": 520.0 / tp}
        saved[tp, mode] = pickle.dumps((times, stored, peak, weights, best))
    path.write_bytes(pickle.dumps(saved))
    return path


FASOP_HEADER = "model,gpu,tp,mbs,layer_index,layer_type,fwdbwd_seconds"
_GPUS = {"A": DEVICES["a100-40gb"], "B": DEVICES["a10g"]}


def fasop_layer_s(hidden: int, tokens: int, vocab: int, kind: str, device: Device) -> float:
    """Forward seconds of one sample in one entry of a model's list of layers."""
    parameters = {"embedding_layer": 0, "post_process": hidden * vocab}.get(kind, 12 * hidden * hidden)
    return roofline_s(2 * tokens * parameters, 40 * tokens * hidden, device)


def fasop_tables(folder: Path, layers: int = 12, nodes: Sequence[str] = ("BBBB", "ABBB")) -> Path:
    """A folder of FASOP's three models on two kinds of nodes, with its settings by name."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = {"gpt2XL": ["transformer_layer"] * layers, "bert": ["transformer_layer"] * layers,
              "T5": ["encoder_layer"] * (layers // 2) + ["embedding_layer"] + ["decoder_layer"] * (layers // 2)}  # fmt: skip
    models: dict[str, dict[str, Any]] = {
        name: {"hidden_size": 1024, "sequence_length": 512, "vocab_size": 32_000, "num_attention_heads": 16, "global_batch_size": 64,
               "layer_types": ["embedding_layer", *own, "post_process"]}
        for name, own in blocks.items()
    }  # fmt: skip
    table = {
        letter: {"instance": device.name, "gpu": device.name, "gpus_per_node": 4, "inter_bits_per_s": 25e9, "usd_per_hour": price,
                 "intra_bits_per_s": 8 * device.intra.bandwidth_bytes_per_s, "usable_mem_gib": device.memory_bytes / 2**30 - 2}
        for (letter, device), price in zip(_GPUS.items(), (16.0, 5.0), strict=True)
    }  # fmt: skip
    named = {f"{model}-{kind}": (model, row) for model in models for kind, row in zip(("homo", "het"), nodes, strict=True)}
    settings = {name: {"model": model, "node_table": "default", "nodes": row, "total_steps": 1000} for name, (model, row) in named.items()}
    settings["gpt2XL-pareto"] = {"model": "gpt2XL", "node_table": "pareto", "nodes": "every cluster", "total_steps": 1000}
    lines = [FASOP_HEADER]
    for (name, model), device, tp, samples in product(models.items(), _GPUS.values(), (1, 2, 4), (1, 2, 4, 8, 16)):
        for index, kind in enumerate(model["layer_types"]):
            second = fasop_layer_s(model["hidden_size"], model["sequence_length"], model["vocab_size"], kind, device)
            lines.append(f"{name},{device.name},{tp},{samples},{index},{kind},{3 * samples * second * (1.0 / tp + 0.1 * (tp > 1)):.7f}")
    (folder / "layer_fwdbwd_cost.csv").write_text("\n".join(lines) + "\n")
    for file, value in (("models", models), ("node_types", {"default": table, "pareto": table}), ("settings", settings)):
        (folder / f"{file}.json").write_text(json.dumps(value))
    return folder

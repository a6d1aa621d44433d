"""Aceso's plans as plans of Penstock, and back, where the two op chains meet.

A plan over the chain of `AcesoTables` converts op by op. Penstock's own chains fuse some of Aceso's ops and split others:

    here    norm1  qkv  attention                         out             norm2 …  logits loss
    Aceso   norm   qkv  score softmax dropout context     dense dropout   norm  …  post-process

What a plan of Aceso does to a part of such a group is rounded, and told: stages are cut before it; ops that are recomputed in part are
recomputed whole, but for fused attention, which keeps none of the parts that Aceso recomputes. Degrees that change inside are refused.
A split (`algo`) says something of multiplications and convolutions that are divided; on other ops of our own chains it is dropped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, first_of, near_misses, plural
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import cluster_of, model_of, with_precision
from penstock.plans.validity import require_valid
from penstock.schedules.rules import DEFAULT_SCHEDULE
from penstock.systems.aceso.files import FAMILY_FIELDS, AcesoPlan, aceso_text, require_consistent
from penstock.systems.tables import validated

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["OpGroup", "begins_op", "from_plan", "groups", "is_torn", "require_precision", "searched_text", "to_plan"]

Setting = tuple[int, tuple[int, int, int, int]]
"""Of an op the stage, and its tp, dp, split (algo) and recompute flag."""

_BLOCKS, _DEEP = (3, 4, 6, 3), (3, 4, 23, 3)
SIZES: dict[str, dict[str, tuple[int | tuple[int, ...], tuple[int, ...]]]] = {
    "gpt": {"350M": (24, (2048, 2048, 16, 1024)), "1_3B": (24, (2048, 2048, 32, 2048)), "2_6B": (32, (2048, 2048, 32, 2560)),
            "6_7B": (32, (2048, 2048, 32, 4096)), "13B": (40, (2048, 2048, 40, 5120))},
    "t5": {"770M": (24, (2048, 512, 2048, 16, 64, 1024, 4096)), "3B": (24, (2048, 512, 2048, 32, 128, 1024, 16384)),
           "6B": (24, (2048, 512, 2048, 64, 128, 1024, 32768)), "11B": (24, (2048, 512, 2048, 128, 128, 1024, 65536)),
           "22B": (48, (2048, 512, 2048, 128, 128, 1024, 65536))},
    "resnet": {"250M": (_BLOCKS, (160, 2)), "500M": (_BLOCKS, (224, 2)), "1B": (_BLOCKS, (320, 2)), "2B": (_BLOCKS, (448, 2)),
               "4B": (_BLOCKS, (640, 2)), "6_8B": (_BLOCKS, (320, 16)), "13B": (_DEEP, (320, 16))},
}  # fmt: skip
"""Aceso's models: number of layers, and the family's fields in order."""

_ATTENTION = "enc-attention-score+enc-attention-softmax+enc-attention-dropout+enc-attention-context"
_OUT_AND_MLP = (
    "out=enc-attention-dense+enc-post-attention-dropout {norm}=enc-2nd-layernorm up=enc-MLP-GEMM-1 act=enc-MLP-gelu "
    "down=enc-MLP-GEMM-2+enc-post-MLP-dropout"
)
_LAYER = f"norm1=enc-1st-layernorm qkv=enc-attention-qkv attention={_ATTENTION} {_OUT_AND_MLP}"
_DECODER = (
    "norm1=dec-1st-layernorm qkv=dec-attention-qkv-1 "
    "attention=dec-attention-score-1+dec-attention-softmax-1+dec-attention-dropout-1+dec-attention-context-1 "
    "out=dec-attention-dense-1+dec-post-attention-dropout-1 norm2=dec-2nd-layernorm cross_q+cross_kv=dec-attention-qkv-2 "
    "cross_attention=dec-attention-score-2+dec-attention-softmax-2+dec-attention-dropout-2+dec-attention-context-2 "
    "cross_out=dec-attention-dense-2+dec-post-attention-dropout-2 norm3=dec-3rd-layernorm up=dec-MLP-GEMM-1 act=dec-MLP-gelu "
    "down=dec-MLP-GEMM-2+dec-post-MLP-dropout"
)
_PAIRS = {
    "gpt": {"embedding": "embedding=encoder-embedding", "layers": _LAYER.format(norm="norm2"),
            "head": "norm=final-layernorm logits+loss=gpt-post-process"},
    "t5": {"embedding": "embedding=encoder-embedding", "encoder": _LAYER.format(norm="norm3"),
           "bridge": "norm=enc-final-layernorm embedding=decoder-embedding", "decoder": _DECODER,
           "head": "norm=dec-final-layernorm logits+loss=t5-post-process"},
    "resnet": {"head": "avgpool=avgpool fc+loss=fc"},
}  # fmt: skip
"""Ops here = ops there, block by block; a ResNet's other blocks hold the same ops on both sides."""
_INNER = {
    family: frozenset(name for pairs in blocks.values() for pair in pairs.split() for name in pair.partition("=")[2].split("+")[1:])
    for family, blocks in _PAIRS.items()
}
"""Aceso's ops that are one op here with the op before them."""
PRECISIONS = {"gpt": "fp16", "t5": "fp16", "resnet": "fp32"}
"""What Aceso trains each family in."""


def searched_text(found: Mapping[str, Any], model: Model) -> str:
    """The file of what a search over the tables of `model` found; the model's sizes are in it where Aceso has names for them."""
    lists = (found["model_parallel_size_of_each_op"], found["data_parallel_size_of_each_op"], found["algo_of_each_op"])
    differ = [len(set(zip(*stage, strict=True))) > 1 for stage in zip(*lists, strict=True)]
    whole = {**found, "resharding_stages": differ}
    if str(model.config["size"]) not in SIZES[model.family]:
        return json.dumps(whole, indent=4)
    _, layers, fields = size_of(model)
    whole |= {"num_layers": layers, **dict(zip(FAMILY_FIELDS[model.family], fields, strict=True))}
    return aceso_text(validated(AcesoPlan, whole, "the plan found"))


def begins_op(family: str, names: Sequence[str]) -> list[bool]:
    """Whether each of Aceso's ops is the first of one here: both chains can be cut before it."""
    return [name not in _INNER[family] for name in names]


def is_torn(found: Mapping[str, Any], model: Model) -> bool:
    """Whether what a search over the tables of `model` found cuts, or recomputes a part of, what is one op here: that is rounded."""
    flags = [(stage, flag) for stage, own in enumerate(found["recompute_ops"]) for flag in own]
    begins = begins_op(model.family, [place.op.config["op"] for place in model.ops])
    return any(before != now for (before, now), begins_here in zip(pairwise(flags), begins[1:], strict=True) if not begins_here)


@dataclass(frozen=True, slots=True)
class OpGroup:
    """Ops [first, last) of a chain here that are the ops `names` of Aceso's chain: the smallest piece both can cut out."""

    first: int
    last: int
    names: tuple[str, ...]


def _is_table_chain(model: Model) -> bool:
    """Whether the chain is one of `AcesoTables`; a model that Aceso has nothing like is refused."""
    source = model.config.get("source")
    if source not in (None, "aceso") or model.family not in _PAIRS:
        raise InputError(f"Aceso has no model like '{model.name}' ({source or model.family}). It has GPT, T5 and Wide-ResNet.")
    return source == "aceso"


def groups(model: Model) -> list[OpGroup]:
    """The chain in groups, in order; one op each for a chain of `AcesoTables`."""
    if _is_table_chain(model):
        return [OpGroup(placed.index, placed.index + 1, (placed.name,)) for placed in model.ops]
    found, first = [], 0
    for (block, copy), ops in groupby(model.ops, lambda placed: (placed.block, placed.copy)):
        names = [placed.op.name for placed in ops]
        pairs = _PAIRS[model.family].get(block, " ".join(f"{name}={name}" for name in names))
        for here, there in (pair.split("=") for pair in pairs.split()):
            found.append(OpGroup(first, first + len(here.split("+")), tuple(f"{block}.{copy}.{name}" for name in there.split("+"))))
            first = found[-1].last
    return found


def size_of(model: Model) -> tuple[str, int | tuple[int, ...], tuple[int, ...]]:
    """The name Aceso has for a model of this size, its layers and the fields of its family."""
    config = model.config
    if _is_table_chain(model):
        layers, fields = SIZES[model.family].get(str(config["size"]), (0, ()))
        if not fields:
            near = near_misses(str(config["size"]), SIZES[model.family])
            raise InputError(f"the sizes of Aceso's {model.family} '{config['size']}' are not known. {near}")
        return str(config["size"]), int(config["num_layers"]) or layers, fields
    if model.family == "gpt":
        layers, fields = config["layers"], (config["seq_length"], config["seq_length"], config["heads"], config["hidden"])
        rest = config["vocab"] == 51200 and config["ffn"] in (0, 4 * config["hidden"]) and config["tied"]
    elif model.family == "t5":
        layers = config["layers"]
        fields = (config["seq_length"], config["dec_length"], config["seq_length"], config["heads"], config["head_width"], config["hidden"],
                  config["ffn"])  # fmt: skip
        rest = config["vocab"] == 30592 and config["dec_layers"] in (0, layers) and config["tied"] and not config["gated"]
    else:
        layers, fields = tuple(config["blocks"]), (config["base_width"], config["width_factor"])
        rest = config["num_classes"] == 1024 and not config["wide_conv1"] and config["image_size"] == 224 and config["stem_pool"]
    alike = [size for size, sizes in SIZES[model.family].items() if sizes == (layers, fields) and rest]
    if not alike:
        raise InputError(f"model '{model.name}' has the sizes of none of Aceso's {model.family} models ({', '.join(SIZES[model.family])}).")
    return alike[0], layers, fields


def to_plan(
    aceso: AcesoPlan, model: Model, *, model_ref: str | Mapping[str, Any], cluster_ref: str | Mapping[str, Any],
    cluster: Cluster | None = None, costs: str = "roofline",
) -> Plan:  # fmt: skip
    """The plan that an Aceso plan means for `model`, which `model_ref` names in it, rounded to ops here, as its notes tell."""
    require_consistent(aceso, "the Aceso plan")
    _require_same_sizes(aceso, model)
    model = with_precision(model, PRECISIONS[model.family])
    pieces = groups(model)
    total = sum(len(piece.names) for piece in pieces)
    if sum(aceso.num_ops_in_each_stage) != total:
        raise InputError(
            f"num_ops_in_each_stage: {plural(sum(aceso.num_ops_in_each_stage), 'op')}, but model '{model.name}' has {total} in Aceso."
        )
    owners = [(stage, op) for stage in range(aceso.num_stages) for op in aceso.per_op(stage)]
    settings, at, rounding = list[Setting](), 0, _Rounding()
    for piece in pieces:
        own = owners[at : at + len(piece.names)]
        if not _is_table_chain(model):
            own = _with_one_split(own, model, piece)
        settings += [rounding.rounded(own, model, piece)] * (piece.last - piece.first)
        at += len(piece.names)
    starts = [0, *accumulate(aceso.num_gpus)]
    bounds = [0, *accumulate(Counter(stage for stage, _ in settings)[stage] for stage in range(aceso.num_stages))]
    stages = tuple(
        _stage(first, tuple(range(starts[stage], starts[stage + 1])), [op for _, op in settings[first:last]])
        for stage, (first, last) in enumerate(pairwise(bounds))
    )
    plan = Plan(
        model_ref, cluster_ref, aceso.global_batch_size, stages, MicroBatching("padded", "fixed", aceso.micro_batch_size),
        seq_length=model.seq_length, dec_length=model.dec_length, precision=model.dtype, costs=costs, notes=tuple(rounding.notes()),
    )  # fmt: skip
    require_valid(plan, model, cluster)
    return plan


@dataclass
class _Rounding:
    """What was rounded of a plan of Aceso, by the names of ops here."""

    kept: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)

    def rounded(self, own: Sequence[Setting], model: Model, piece: OpGroup) -> Setting:
        """The one setting of a group whose ops have these."""
        stage, (tp, dp, algo, again) = own[0]
        name = model.ops[piece.first].name
        if own[-1][0] != stage:
            self.moved.append(name)
        inside = [op for at, op in own if at == stage]
        if len({op[:3] for op in inside}) > 1:
            changed = next(name for name, (_, op) in zip(piece.names, own, strict=True) if op[:3] != (tp, dp, algo))
            raise InputError(
                f"tp, dp or split changes at Aceso's op '{changed}', inside what is one op '{name}' here ({', '.join(piece.names)}). "
                "Move it to the start of the group."
            )
        if len({op[3] for _, op in own}) > 1:
            keeps_nothing = model.ops[piece.first].op.config.get("fused", False)  # of scores and probabilities
            (self.kept if keeps_nothing else self.whole).append(name)
            again = int(not keeps_nothing)
        return stage, (tp, dp, algo, again)

    def notes(self) -> Iterator[str]:
        """What a reader should know of it."""
        for names, what in (
            (self.moved, "Aceso's plan begins a stage inside of what is one op here; it begins behind that"),
            (self.kept, "Aceso's plan recomputes a part of attention that is never kept here; nothing of it runs again"),
            (self.whole, "Aceso's plan recomputes a part of what is one op here; all of it runs again"),
        ):
            if names:
                yield f"{what}: {first_of(names, 3)}."


def _require_same_sizes(aceso: AcesoPlan, model: Model) -> None:
    """Refuses a plan that was made for another model, or for one of the same name with other sizes."""
    size, layers, fields = size_of(model)
    if (aceso.model_name, aceso.model_size, aceso.num_layers) != (model.family, size, layers):
        given = f"{aceso.model_name} {aceso.model_size} of {aceso.num_layers} layers"
        raise InputError(f"the Aceso plan is for {given}; model '{model.name}' is {model.family} {size} of {layers} layers.")
    for name, expected in zip(FAMILY_FIELDS[model.family], fields, strict=True):
        if getattr(aceso, name) != expected:
            raise InputError(f"{name} of the Aceso plan is {getattr(aceso, name)}, of model '{model.name}' {expected}.")


def _with_one_split(own: Sequence[Setting], model: Model, piece: OpGroup) -> list[Setting]:
    """The settings of a group with the split of its first op, which is what is multiplied; 0 where there is nothing to choose."""
    splits = min(len(placed.op.splits) for placed in model.ops[piece.first : piece.last])
    algo = own[0][1][2] if splits > 1 else 0
    return [(stage, (tp, dp, algo if tp > 1 else 0, again)) for stage, (tp, dp, _, again) in own]


def _stage(first: int, ranks: tuple[int, ...], ops: Sequence[tuple[int, int, int, int]]) -> Stage:
    """A stage whose usual degrees are the most frequent ones; ops with others or with the swapped split become runs."""
    (tp, dp), _ = Counter((tp, dp) for tp, dp, _, _ in ops).most_common(1)[0]
    runs, again, at = [], [], first
    for (op_tp, op_dp, algo), same in groupby(ops, lambda op: op[:3]):
        start, at = at, at + len(list(same))
        if (op_tp, op_dp, algo) != (tp, dp, 0):
            runs.append(OpRun(start, at, op_tp, op_dp, algo))
    at = first
    for flag, same in groupby(ops, lambda op: op[3]):
        start, at = at, at + len(list(same))
        again += [(start, at)] * flag
    return Stage(first, at, (ranks,), Degrees(tp, dp), tuple(runs), (tuple(again),) if again else ())


def from_plan(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> AcesoPlan:
    """The plan as Aceso's runtime takes it; replicas become a larger dp, and what it does not know is refused."""
    model, cluster = model or model_of(plan), cluster or cluster_of(plan)
    require_valid(plan, model, cluster)
    size, layers, fields = size_of(model)
    replicas, samples = plan.num_replicas, plan.micro_batching.samples or 0
    _require_known_to_aceso(plan, model, cluster)
    settings: list[list[tuple[int, int, int, int]]] = [[] for _ in plan.stages]
    by_op = list(_settings(plan))
    for piece in groups(model):
        own = by_op[piece.first : piece.last]
        if len(set(own)) > 1:
            names = ", ".join(placed.name for placed in model.ops[piece.first : piece.last])
            raise InputError(
                f"Aceso cannot express stage {own[-1][0]}: {names} are one op '{piece.names[0]}' there, but differ in stage, degrees or "
                "recomputation. Treat them alike."
            )
        stage, (tp, dp, algo, again) = own[0]
        settings[stage] += [(tp, dp * replicas, algo, again)] * len(piece.names)
    columns = [tuple(tuple(op[field] for op in ops) for ops in settings) for field in range(4)]
    return AcesoPlan(
        model.family, size, layers, plan.global_batch, samples * replicas, plan.num_stages,
        num_gpus=tuple(stage.num_devices * replicas for stage in plan.stages),
        checkpoint_activations=tuple(any(op[3] for op in ops) for ops in settings),
        resharding_stages=tuple(len({op[:3] for op in ops}) > 1 for ops in settings),
        num_ops_in_each_stage=tuple(map(len, settings)),
        model_parallel_size_of_each_op=columns[0], data_parallel_size_of_each_op=columns[1], algo_of_each_op=columns[2],
        recompute_ops=columns[3], **dict(zip(FAMILY_FIELDS[model.family], fields, strict=True)),
    )  # fmt: skip


def _settings(plan: Plan) -> Iterator[Setting]:
    """The setting of each op of a plan."""
    for index, stage in enumerate(plan.stages):
        again = stage.recomputed()
        for op in range(stage.first, stage.last):
            run = stage.run_of(op)
            yield index, (run.tp, run.dp, run.algo, int(op - stage.first in again))


def require_precision(model: Model, precision: str) -> None:
    """Refuses a precision in which Aceso does not train the model's family."""
    usual = PRECISIONS[model.family]
    if precision != usual:
        text = f"Aceso cannot express precision {precision}; it trains {model.family} in {usual}"
        raise InputError(f"{text}. Search with --precision {usual}.")


def _require_known_to_aceso(plan: Plan, model: Model, cluster: Cluster) -> None:
    """Refuses schedules, layouts, sharding, placement and devices that Aceso's runtime has no word for."""
    require_precision(model, plan.precision)
    for wrong, reason in (
        (plan.schedule != DEFAULT_SCHEDULE, f"schedule '{plan.schedule}'; it has '{DEFAULT_SCHEDULE}'"),
        (plan.micro_batching.layout != "padded", "packed micro-batches; it has padded ones"),
        (plan.micro_batching.policy != "fixed", "micro-batches that differ from batch to batch; it has fixed ones"),
        (len(set(plan.micro_batching.per_replica)) > 1, "replicas with unequal numbers of micro-batches; all have as many"),
        (len(cluster.kinds) > 1, f"devices of several kinds ({', '.join(device.name for device, _ in cluster.kinds)}); it has one"),
    ):
        if wrong:
            raise InputError(f"Aceso cannot express {reason}.")
    start = 0
    for index, stage in enumerate(plan.stages):
        ranks = [rank for group in stage.devices for rank in group]
        for wrong, reason in (
            (stage.zero > 0, f"ZeRO-{stage.zero}; every rank keeps its whole optimizer state"),
            (stage.sequence_parallel and stage.degrees.tp > 1, "sequence parallelism"),
            (len(stage.recompute) > 1, f"{len(stage.recompute)} recomputation patterns; a stage has one"),
            (len(ranks) not in (1, 2, 4, 8), f"{len(ranks)} GPUs; a stage has 1, 2, 4 or 8"),
            (ranks != list(range(start, start + len(ranks))), f"ranks that do not follow on from {start}, as its stages do"),
            (len({cluster.node_index(rank) for rank in ranks}) > 1, "GPUs of several nodes; a stage stays inside one"),
            (model.family == "t5" and bool(stage.runs), "ops with degrees of their own; it does not reshard inside a stage of T5"),
        ):
            if wrong:
                raise InputError(f"Aceso cannot express stage {index}: {reason}.")
        start += len(ranks)

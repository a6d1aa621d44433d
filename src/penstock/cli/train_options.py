"""The options of `penstock train`, which are fields of a job but for what only a plan file goes with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import BIG, MAX_PLANNERS, MAX_SEARCH_STEPS, SEED, folder_to_write, within

__all__ = [
    "Adapt", "BudgetSteps", "Changes", "CheckpointEvery", "ClipNorm", "CompareFlag", "CopySteps", "DataPaths", "Deterministic",
    "DeviceKind", "DisturbFile", "EvalEvery", "FirstWeights", "JobCluster", "JobCosts", "JobTokenizer", "Keep", "Master", "ModelSource",
    "NodeRank", "OnDeath", "OnNan", "PeakRate", "PlanOrJob", "Planners", "ReservedShare", "ResumeFrom", "RunFolder", "Seed", "ShareGpus",
    "SlowRanks", "Spares", "Steps", "StoreAddress", "StoreTimeout", "TokensPerBatch", "TorchProfile", "WarmUp",
]  # fmt: skip



def _without_password(address: str) -> str:
    from penstock.stores.addresses import without_password

    return without_password(address)


# What is trained, on what, and where it goes.
PlanOrJob = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN|JOB", help="A plan file, as `penstock search --out` writes it, or a job file (.yaml)."),
]
ModelSource = Annotated[str, typer.Option(help="Model name, YAML file, hf:FOLDER or module:FILE.py:FUNCTION; it is planned for first.")]
DataPaths = Annotated[
    list[str] | None,
    typer.Option(
        help="JSONL, CSV, Parquet or text file, or folder of Hugging Face datasets; repeatable. Or a folder that `penstock prepare-data` "
        "wrote."
    ),
]
RunFolder = Annotated[
    Path | None, typer.Option("--out", metavar="RUN", callback=folder_to_write, help="Folder for checkpoints, steps and spans.")
]
Steps = Annotated[
    int | None,
    typer.Option(callback=within(1, BIG), help="Iterations in all, those before a checkpoint included; a job: one epoch."),
]

# What only a job has.
TokensPerBatch = Annotated[
    int | None, typer.Option(callback=within(1, BIG), help="Tokens of a global batch of a job, on average; 65,536 if not given.")
]
JobCluster = Annotated[str, typer.Option(help="Devices of a job: `local`, a cluster file, or a shorthand such as 4xa100-40gb.")]
JobCosts = Annotated[
    str, typer.Option(help="Costs of a job: roofline, profile:FILE, measure (a minute, once); auto: measure on a GPU.")
]
JobTokenizer = Annotated[str | None, typer.Option(help="Tokenizer of a job: a file or folder; the model's own if not given.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change any field of a job, as in train.lr=1e-5; repeatable.")
]

# Devices, what is done to them, and what is done about it.
CompareFlag = Annotated[
    bool, typer.Option("--compare", help="Print predicted against measured times and memory, and what differs most.")
]
DeviceKind = Annotated[
    str,
    typer.Option(
        help="cpu or cuda; what the plan's cluster has if not given. timed: rehearse it, ops being waits. paced: train on the "
        "processor, at the pace of the plan's devices."
    ),
]
SlowRanks = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK=FACTOR", help="With timed and paced devices: this rank takes so many times as long; repeatable."),
]
DisturbFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What slows timed and paced devices down, or strikes ranks, and at which steps (YAML)."),
]
Adapt = Annotated[
    str,
    typer.Option(metavar="off|watch|move", help="watch: notice slow ranks, say what could be done (`penstock events`); move: do it."),
]
OnDeath = Annotated[
    str,
    typer.Option(metavar="end|recover", help="When a rank dies or freezes: end, or go on with another process in its place."),
]
CopySteps = Annotated[
    int,
    typer.Option(metavar="STEPS", callback=within(0, BIG), help="With recover: steps between copies to go on from; 0: none."),
]
Spares = Annotated[int, typer.Option(metavar="N", callback=within(0, BIG), help="With recover: devices that take the place of lost ones.")]
NodeRank = Annotated[
    int | None,
    typer.Option(metavar="R", callback=within(0, BIG), help="On several nodes: which of them this is; it starts those of its ranks."),
]
Master = Annotated[str, typer.Option(metavar="HOST:PORT", help="With --node-rank: where node 0 is met, whose address this is.")]
ShareGpus = Annotated[
    bool, typer.Option("--share-gpus", help="Let several ranks run on one GPU, each with its part under MPS.")
]
ReservedShare = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of each GPU's memory to take at the start, such as 0.9; 0: as it is needed.")
]

# Learning.
PeakRate = Annotated[float, typer.Option(callback=within(0, 1e30), help="Highest learning rate.")]
WarmUp = Annotated[
    int, typer.Option(callback=within(0, BIG), help="Steps in which the learning rate rises; it then falls as a cosine.")
]
ClipNorm = Annotated[
    float, typer.Option(callback=within(0, BIG), help="Largest norm of the gradients; 0: any, as asynchronous schedules need.")
]
OnNan = Annotated[str, typer.Option(help="At a loss or gradients that are not finite: stop, or skip the update.")]
EvalEvery = Annotated[
    int, typer.Option(callback=within(0, BIG), help="Steps between evaluations on the held-out split; 0: never.")
]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        callback=within(0, BIG), help="Steps between checkpoints, of which there is one every ten minutes besides; 0: only at the end."
    ),
]
Keep = Annotated[
    int, typer.Option(callback=within(1, BIG), help="Checkpoints that stay, the newest ones; the best by evaluation stays besides.")
]
ResumeFrom = Annotated[str, typer.Option(metavar="CHECKPOINT", help="Go on from this checkpoint, or the latest of a folder.")]
FirstWeights = Annotated[
    str, typer.Option(metavar="SOURCE", help="Begin with the weights of hf:FOLDER (safetensors of Hugging Face) or of a checkpoint.")
]

# Planning beside training.
Planners = Annotated[
    int,
    typer.Option(
        callback=within(0, MAX_PLANNERS), help="Planner processes on each node; 0: every rank plans for itself (for debugging)."
    ),
]
BudgetSteps = Annotated[
    int,
    typer.Option(
        callback=within(0, MAX_SEARCH_STEPS), help="Steps of search for each batch of dynamic micro-batches; 0: plan at once."
    ),
]
StoreAddress = Annotated[
    str,
    typer.Option(
        callback=_without_password,
        help="Store between planners and ranks, such as file:store.json; PENSTOCK_STORE, or one of its own if not given.",
    ),
]
StoreTimeout = Annotated[
    float, typer.Option(callback=within(0, BIG), help="Seconds that the store may be away before the run ends with a checkpoint.")
]

# Repeating and looking closer.
TorchProfile = Annotated[str, typer.Option(metavar="STEPS", help="Write torch.profiler traces of these steps, such as 3,4.")]
Seed = Annotated[int, typer.Option(callback=within(0, SEED), help="Of weights, dropout and the order of samples.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="On a GPU: the same losses to the bit in every run, at some cost in speed.")
]

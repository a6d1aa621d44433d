"""Random instructions and programs, well-formed but otherwise without sense, for the text and binary forms."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.programs import instructions as i

counts = st.integers(0, 300) | st.integers(0, 2**63 - 1)
ranges = st.tuples(counts, counts)
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,12}", fullmatch=True)
dtypes = st.sampled_from(["bf16", "fp16", "fp32", "int64"])
shapes = st.lists(counts, max_size=4).map(tuple)


def some(strategy: st.SearchStrategy[object], least: int = 0) -> st.SearchStrategy[tuple[object, ...]]:
    """A tuple of a few."""
    return st.lists(strategy, min_size=least, max_size=3).map(tuple)


tensors = some(st.builds(i.Tensor, words, dtypes, shapes))
parts = some(st.builds(i.Part, words, dtypes, shapes, st.none() | ranges, st.none() | ranges, st.booleans()))
kinds = st.sampled_from(["activation", "gradient"])
buffers = st.none() | counts
tied = some(st.builds(i.TiedRows, counts, counts, counts, st.none() | ranges))
needs = some(st.sampled_from(["inputs", "dec_inputs", "labels"]))
groups = some(st.builds(i.ReduceGroup, counts, counts, some(counts, 1)))

instructions = st.one_of(
    st.builds(i.Load, counts, counts, counts, needs),
    st.builds(i.Forward, counts, counts, counts, counts, buffers, buffers, tensors),
    st.builds(i.Backward, counts, counts, buffers, buffers, tensors),
    st.builds(i.BackwardInput, counts, counts, buffers, buffers, tensors),
    st.builds(i.BackwardWeight, counts, counts),
    st.builds(i.SendStart, kinds, counts, counts, counts, counts, parts),
    st.builds(i.SendWait, kinds, counts, counts, counts),
    st.builds(i.ReceiveStart, kinds, counts, counts, counts, counts, parts),
    st.builds(i.ReceiveWait, kinds, counts, counts, counts),
    st.builds(i.Free, some(counts)),
    st.builds(i.ReduceStart, counts, groups, buffers),
    st.builds(i.ReduceWait, counts),
    st.builds(i.SyncTied, words.filter(lambda word: word not in ("send", "receive")), tied, tied),
    st.just(i.Step()),
    st.builds(i.StepStage, counts, counts, groups),
)

degrees = st.integers(1, 2**63 - 1)
micro_batches = st.builds(
    i.MicroBatch, counts, some(counts), st.sampled_from(["padded", "packed"]), some(counts), some(counts), counts, counts, some(counts),
    some(counts),
    st.dictionaries(degrees, some(counts, 3), max_size=2),
)  # fmt: skip
places = st.builds(i.Place, counts, counts, counts, counts, degrees, degrees, degrees, degrees)
programs = st.builds(
    i.Program, counts, counts, counts, degrees, degrees, degrees, degrees, some(places), some(micro_batches),
    st.lists(instructions, max_size=8).map(tuple), st.booleans(),
)  # fmt: skip

"""Bugs that somebody could write, each with the tests that must catch it. `mutants.py` plants them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLANTED", "PlantedBug"]


@dataclass(frozen=True)
class PlantedBug:
    """One small change that makes Penstock wrong."""

    name: str
    file: str
    """Below src/penstock."""
    old: str
    """Text that occurs once in the file."""
    new: str
    why: str
    """How it could come about, or what it breaks."""
    tests: tuple[str, ...]
    """Files or folders."""
    pick: str = ""
    """Which tests of them, as pytest's -k; all if empty."""

    @property
    def room(self) -> str:
        """The first folder of its file, or the file itself."""
        return self.file.split("/")[0].removesuffix(".py")

    def planted_in(self, text: str) -> str:
        """The file's text with the bug."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def _bug(name: str, file: str, old: str, new: str, why: str, *tests: str, pick: str = "") -> PlantedBug:
    return PlantedBug(name, file, old, new, why, tuple(f"tests/{test}" for test in tests), pick)


_GROUND = (
    _bug("a spreadsheet's mark is read as text", "files.py", 'decode("utf-8-sig")', 'decode("utf-8")',
         "files that Excel saves begin with a mark", "test_files.py"),
    _bug("a name given twice is taken", "files.py", "if len(found) < len(pairs):", "if len(found) > len(pairs):",
         "the first of two values is lost silently", "test_files.py"),
)
_CLUSTERS = (
    _bug("two networks, the faster counts", "clusters/cluster.py",
         "return min(node.inter.bandwidth_bytes_per_s / max(node.num_rails, num_flows)",
         "return max(node.inter.bandwidth_bytes_per_s / max(node.num_rails, num_flows)", "min for max", "clusters/test_cluster.py",
         "costs/test_collectives.py"),
    _bug("a flow alone drives all rails", "clusters/cluster.py", "/ max(node.num_rails, num_flows)", "/ num_flows",
         "one card of eight is one rail", "clusters/test_cluster.py", "costs/test_collectives.py"),
    _bug("the last node is left out of the price", "clusters/cluster.py", "known = [price * run.count for", "known = [price for",
         "the price of a run is that of one node", "clusters/test_cluster.py", "clusters/test_shorthand.py"),
    _bug("left-over devices are forgotten", "clusters/shorthand.py",
         "return (*full_runs, NodeRun(plain_node(device, rest))) if rest else full_runs",
         "return full_runs or (NodeRun(plain_node(device, rest)),)",
         "12 devices become 8", "clusters/test_shorthand.py"),
    _bug("bf16 is priced as fp16", "clusters/hardware.py", '"bf16": "fp32", "fp16"', '"bf16": "fp16", "fp16"',
         "where it is emulated", "clusters/test_catalogue.py"),
)  # fmt: skip
_MODELS = (
    _bug("position weights are not counted", "models/transformer.py", "extra = (max_positions + types) * width + buckets * heads",
         "extra = types * width + buckets * heads", "a table forgotten in the formula", "models/test_parameters.py",
         "models/modules/test_description.py"),
    _bug("a norm keeps one statistic", "models/transformer.py", "statistics = 4 if rms else 8", "statistics = 4",
         "layer norm keeps mean and deviation", "models/modules/test_description.py"),
    _bug("nothing is recomputed by a chain", "models/modules/build.py", "            if part.recomputed:", "            if False:",
         "the same losses, all activations kept", "runtime/parallel/test_stage.py"),
    _bug("recomputed statistics move twice", "models/modules/convolution.py", "mean, var = mean.clone(), var.clone()",
         "mean, var = mean, var", "the second run of a forward pass moves them again", "models/modules/test_convolution.py"),
)  # fmt: skip
_SCHEDULES = (
    _bug("1F1B runs one further ahead", "schedules/orders.py", "return with_depths(range(num_stages, 0, -1), num_micro_batches)",
         "return with_depths(range(num_stages + 1, 1, -1), num_micro_batches)", "off by one", "schedules"),
    _bug("in flight: one too few", "schedules/in_flight.py", "return (min(num_micro_batches, num_groups - group),)",
         "return (min(num_micro_batches, max(1, num_groups - group - 1)),)", "the stage's own micro-batch is forgotten", "schedules"),
    _bug("interleaved warm-up too short", "schedules/in_flight.py", "return (num_groups - group - 1) * 2 + (num_chunks - 1) * num_groups",
         "return (num_groups - group - 1) + (num_chunks - 1) * num_groups", "Megatron's factor of two", "schedules"),
)  # fmt: skip
_PLANS = (
    _bug("dp and tp ranks are exchanged", "plans/degrees.py", "return index // self._stride(axis) % self.of(axis)",
         "return index % self.of(axis)", "the stride is forgotten", "plans/test_degrees.py"),
    _bug("holders of the same weights: the wrong lane", "plans/degrees.py",
         "return [ranks[first + outer * share + inner * part] for share in range(self.dp) for part in range(self.cp)]",
         "return [ranks[outer * share + inner * part] for share in range(self.dp) for part in range(self.cp)]",
         "gradients of other weights are summed", "plans/test_degrees.py", "plans/test_ranks.py"),
)  # fmt: skip
_COSTS = (
    _bug("ZeRO divides gradients a level early", "costs/memory.py", "for level in (3, 2, 1)]", "for level in (3, 1, 1)]",
         "ZeRO-1 keeps whole gradients", "costs/test_memory.py"),
    _bug("messages are held once", "costs/memory.py", "return sum(2 * model.boundary_bytes(cut)", "return sum(model.boundary_bytes(cut)",
         "activation and gradient lie there at once", "costs/test_memory.py"),
    _bug("all-reduce in one pass", "costs/collectives.py", 'passes = {"all_reduce": 2 * share,', 'passes = {"all_reduce": share,',
         "half the traffic", "costs/test_collectives.py"),
    _bug("sharing is ignored", "costs/collectives.py", "flows = min(counts) * sharing", "flows = min(counts)",
         "groups of other stages use the network too", "costs/test_collectives.py"),
    _bug("gradients have the weights' bytes", "costs/memory.py", "_PRECISIONS[gradients or precision][0]", "_PRECISIONS[precision][0]",
         "fp32 sums are not counted", "costs/test_memory.py"),
    _bug("nobody waits for the slowest", "costs/company.py", "return 1 + SPREAD * 2.4 if", "return 1.0 if",
         "all devices are average", "costs/test_company.py"),
    _bug("the last bucket is free", "costs/collectives.py", "(sent_s(rest) if rest else 0.0)",
         "(sent_s(rest) if rest < 0 else 0.0)",
         "what does not fill a bucket is not priced", "costs/test_collectives.py"),
)  # fmt: skip
_TIMING = (
    _bug("gradients back have the network alone", "timing/messages.py",
         "point_to_point_s(back, cluster, b, a, _sharing(cluster, flows, a, b))",
         "point_to_point_s(back, cluster, b, a, 1)", "only activations share it", "timing/test_messages.py"),
    _bug("tied sums have the network alone", "timing/messages.py", "sharing = _sharing(cluster, _flows(cluster, pairs), a, b)",
         "sharing = 1", "replicas sum at the same time", "timing/test_messages.py"),
    _bug("only the sender's node is busy", "timing/messages.py",
         "return max(1, flows[cluster.node_index(a)], flows[cluster.node_index(b)])",
         "return max(1, flows[cluster.node_index(a)])", "the other end may be the narrow one", "timing/test_messages.py"),
    _bug("chunks are counted as groups", "timing/messages.py", "for stage in {stage.devices: stage for stage in plan.stages}.values():",
         "for stage in plan.stages:", "chunks of a device reduce one after the other", "timing/test_messages.py"),
    _bug("gradient groups that stay inside count", "timing/messages.py", "crossing.update(nodes if len(nodes) > 1 else ())",
         "crossing.update(nodes)", "they do not use the network", "timing/test_messages.py"),
    _bug("a split backward lets go too early", "timing/order_memory.py", "INPUT_GRAD: 0, WEIGHT_GRAD: -1}\n_WAITING",
         "INPUT_GRAD: -1, WEIGHT_GRAD: 0}\n_WAITING", "weight gradients still need the activations", "schedules", "timing"),
    _bug("a share of samples is rounded down", "timing/pipeline.py", "rows = -(-samples // dp)", "rows = max(1, samples // dp)",
         "the largest share decides", "timing"),
)  # fmt: skip
_ORDERING = (
    _bug("the last stage waits for its own successor", "ordering/adaptive.py", "last = workload.num_stages - 1",
         "last = workload.num_stages",
         "off by one", "ordering"),
    _bug("an order that does not fit is taken", "ordering/choose.py", "if run.violation is None and run.makespan_s < best_s:",
         "if run.makespan_s < best_s:", "memory is not looked at", "ordering/test_choose.py"),
)  # fmt: skip
_BATCHING = (
    _bug("micro-batches keep their old numbers", "batching/reorder.py", "numbers[micro_batch] = number", "numbers[number] = micro_batch",
         "a permutation instead of its inverse", "batching/test_reorder.py"),
    _bug("cheap samples are dealt first", "batching/packing.py", 'np.argsort(-weights, kind="stable")',
         'np.argsort(weights, kind="stable")',
         "a sign", "batching/test_baselines.py"),
)  # fmt: skip
_SEARCH = (
    _bug("plans that do not fit are listed", "search/uniform.py", "        if choice.estimate.fits:", "        if choice.estimate.time_s:",
         "memory is not looked at", "search/test_uniform.py"),
    _bug("a choice dominates itself", "search/money.py", "return all(a <= b * (1 + 1e-9) for a, b in zip(mine, its, strict=True)) and any(",
         "return any(a <= b * (1 + 1e-9) for a, b in zip(mine, its, strict=True)) and any(", "better in one axis is not better",
         "cli/test_pareto.py"),
    _bug("the slowest plan first", "search/uniform.py", "fitting.sort(key=lambda choice: (choice.estimate.time_s,",
         "fitting.sort(key=lambda choice: (-choice.estimate.time_s,", "a sign", "search/test_uniform.py"),
)  # fmt: skip
_PROGRAMS = (
    _bug("a buffer is given back while a send runs", "programs/flow.py",
         "            if buffer.pending:\n                self.wrong(f\"frees",
         "            if not buffer:\n                self.wrong(f\"frees", "the send reads what the next pass writes",
         "programs/test_mutations.py"),
    _bug("a batch stays in its buffer", "programs/lower.py", "            self._empty(batch, source)", "            self._empty(source)",
         "the buffer is never given back", "programs/test_lower.py"),
    _bug("the checker lets batches lie", "programs/flow.py",
         "        for number, buffer in sorted(self.buffers.items()):\n            self.wrong(",
         '        for number, buffer in sorted(self.buffers.items()):\n            if buffer.kind != "batch":\n              self.wrong(',
         "memory grows from step to step", "programs/test_mutations.py", pick="every_buffer"),
    _bug("two numbers for one free buffer", "programs/lower.py", "            heapq.heappush(self._free, number)",
         "            heapq.heappush(self._free, number + 1)", "off by one", "programs/test_lower.py"),
    _bug("reductions in rising order", "programs/lower.py", "for stage in sorted(self.indices, reverse=True):",
         "for stage in sorted(self.indices):", "ranks disagree and wait for ever", "programs/test_lower.py"),
)  # fmt: skip
_STORES = (
    _bug("a seal does not hold the name", "stores/sealing.py", 'len(label).to_bytes(4, "big") + label + payload', "payload",
         "an entry can be moved to another name", "stores/test_sealing.py"),
    _bug("any seal opens", "stores/sealing.py", "if not hmac.compare_digest(_mac(key, name, payload), sealed[len(_MAGIC) : _HEAD_BYTES]):",
         "if hmac.compare_digest(_mac(key, name, payload), b''):", "the check is turned off", "stores/test_sealing.py"),
    _bug("secrets that others may read", "stores/sealing.py", "if mode & 0o077:", "if mode & 0o007:", "the group is forgotten",
         "stores/test_sealing.py", "stores/test_server.py"),
)  # fmt: skip
_DATA = (
    _bug("every epoch in the same order", "data/mixture.py", "places = shuffled(places, self.epoch_size, self.seed, epoch)",
         "places = shuffled(places, self.epoch_size, self.seed)", "the epoch is not in the seed", "data/test_mixture.py",
         "data/test_batches.py"),
    _bug("a sample between two batches is lost", "data/batches.py", "self._starts[known] = first + end",
         "self._starts[known] = first + end + 1", "off by one", "data/test_batches.py"),
    _bug("a resumed run starts elsewhere", "data/batches.py", 'self._starts[int(state["step"])] = int(state["position"])',
         'self._starts[int(state["step"])] = int(state["position"]) + 1', "off by one", "data/test_batches.py"),
    _bug("another seed is taken", "data/batches.py", "            if state.get(name) != mine:", "            if state.get(name) is None:",
         "a run goes on with other data", "data/test_batches.py"),
    _bug("limits are ignored", "data/batches.py", "np.minimum(lengths[samples], limit) for", "lengths[samples] for",
         "samples are longer than the plan's", "data/test_batches.py"),
)  # fmt: skip
_INTEROP = (
    _bug("DeepSpeed's parts without the first", "interop/deepspeed.py", '"parts": [0, *accumulate(len(part) for part in grid.parts)]',
         '"parts": [*accumulate(len(part) for part in grid.parts)]', "off by one", "interop/test_deepspeed.py"),
    _bug("Megatron recomputes one layer", "interop/megatron.py", '("--recompute-method", "block"), ("--recompute-num-layers", str(most))',
         '("--recompute-method", "block"), ("--recompute-num-layers", "1")', "a number forgotten", "interop/test_megatron.py"),
)  # fmt: skip
_SYSTEMS = (
    _bug("DynaPipe: layers keep one workspace less", "systems/dynapipe/rules.py", "top += stored + (layers - 1) * cost[2] + cost[3]",
         "top += stored + layers * cost[2] + cost[3]", "off by one", "systems/dynapipe"),
)  # fmt: skip
_RUNTIME = (
    _bug("recomputation never happens", "runtime/parallel/stage.py",
         "again = [op - piece.first for op in recomputed if piece.first <= op < piece.last]", "again: list[int] = []",
         "the same losses, all activations kept", "runtime/parallel/test_stage.py"),
    _bug("a full bucket is not summed", "runtime/parallel/gradients.py",
         "            self._launch(self.buckets[self._next])\n", "", "only the last buckets are", "runtime/parallel/test_gradients.py"),
    _bug("a full bucket is forgotten", "runtime/parallel/gradients.py",
         "                yield _bucket(filled, ranks_of[number], owner, dtype)\n", "", "its weights belong to none",
         "runtime/parallel/test_gradients.py"),
    _bug("gradients are summed in the weights' dtype", "runtime/parallel/sharding.py",
         'return torch.float32 if world.plan.gradients == "fp32" else weight.dtype', "return weight.dtype",
         "each sum over micro-batches loses bits", "runtime/parallel/test_gradients.py", pick="dtype_of_the_plan"),
    _bug("ZeRO places without padding", "runtime/parallel/sharding.py", "        place += shard.width",
         "        place += shard.part.numel()",
         "right where all sizes divide", "runtime/parallel/test_sharding.py", pick="not_divide"),
    _bug("ZeRO parts leave a rest", "runtime/parallel/sharding.py",
         "flat, width = whole.detach().view(-1), -(-whole.numel() // len(ranks))",
         "flat, width = whole.detach().view(-1), whole.numel() // len(ranks)", "rounded down",
         "runtime/parallel/test_sharding.py", pick="not_divide"),
    _bug("running statistics are not read", "runtime/rank_state.py", "            source.load(_buffers(module))",
         "            _buffers(module)",
         "no training loss tells", "runtime/test_rank_state.py", pick="come"),
    _bug("running statistics are not saved", "runtime/rank_state.py", "                yield from _buffers(module)",
         "                yield from ()", "no training loss tells", "runtime/test_rank_state.py", pick="come"),
    _bug("the loss scale is not read", "runtime/rank_state.py", "            setattr(rank.update.scale, name, value)", "            pass",
         "the run starts anew from 65536", "runtime/test_rank_state.py", pick="come"),
    _bug("the loss scale is not saved", "runtime/rank_state.py", '"loss_scale": None if scale is None else asdict(scale)',
         '"loss_scale": None',
         "the run starts anew from 65536", "runtime/test_rank_state.py", pick="come"),
    _bug("evaluation loss halved", "runtime/rank.py", "return Evaluated(loss, correct / max(1.0, counted))",
         "return Evaluated(loss / 2, correct / max(1.0, counted))", "the same on every plan", "runtime/test_rank.py"),
    _bug("accuracy halved", "runtime/rank.py", "return Evaluated(loss, correct / max(1.0, counted))",
         "return Evaluated(loss, correct / max(1.0, counted) / 2)", "the same on every plan", "runtime/test_rank.py"),
    _bug("padding counts as a label", "runtime/parallel/accuracy.py", "live = batch.weights > 0", "live = batch.weights >= 0",
         "accuracy over rows that are no tokens", "runtime/test_rank.py"),
    _bug("the mean over batches is a sum", "runtime/run.py", "statistics.fmean(one.loss for one in found)",
         "sum(one.loss for one in found)",
         "seen only with several batches", "runtime/test_run.py"),
    _bug("batches are never let go", "runtime/rank.py", "            self._buffers.pop(number, None)\n",
         "            self._kept = [*getattr(self, '_kept', ()), self._buffers.pop(number, None)]\n", "memory grows",
         "runtime/parallel/test_stage.py"),
    _bug("an incomplete program passes", "runtime/rank.py", "if left or running or self._sends or self._receives:",
         "if running or self._sends or self._receives:", "memory grows from step to step", "runtime/test_rank.py"),
    _bug("warm-up starts at zero", "runtime/settings.py", "return self.peak * (step + 1) / self.warmup_steps",
         "return self.peak * step / self.warmup_steps", "off by one", "runtime/test_settings.py"),
    _bug("the loss scale never rises", "runtime/update.py", "if self.good_steps == self.patience:",
         "if self.good_steps > self.patience * 2:",
         "small gradients vanish", "runtime/test_update.py"),
    _bug("ZeRO-1 owners keep their updates", "runtime/parallel/gradients.py", "if bucket.owner is None or len(bucket.ranks) == 1:",
         "if bucket.owner is None or len(bucket.ranks) >= 1:", "ranks drift apart", "runtime/parallel/test_gradients.py"),
)  # fmt: skip
_PROFILING = (
    _bug("a transfer there and back is one", "profiling/links.py", '/ (2 if kind == "transfer" else 1)', "/ 1",
         "links seem half as fast", "profiling/test_links.py"),
    _bug("a shortened model is whole", "profiling/measure.py", "(block, min(count, copies)) for", "(block, max(count, copies)) for",
         "profiles take for ever", "profiling/test_measure.py", pick="shortened"),
)  # fmt: skip
_REPORTS = (
    _bug("times beyond the end are drawn", "reports/drawing.py", "min(until_s, makespan_s)", "max(until_s, makespan_s)",
         "the cut is ignored", "reports/test_drawing.py"),
)
_CLI = (
    _bug("beaten choices are shown first", "cli/pareto.py", "key=lambda offer: (bool(offer.dominated_by), offer.hours)",
         "key=lambda offer: (not offer.dominated_by, offer.hours)", "a sign", "cli/test_pareto.py"),
    _bug("beaten choices are always shown", "cli/pareto.py", 'if dominated or not row["dominated_by"]]', "]",
         "the option does nothing", "cli/test_pareto.py"),
)  # fmt: skip

PLANTED = (
    *_GROUND, *_CLUSTERS, *_MODELS, *_SCHEDULES, *_PLANS, *_COSTS, *_TIMING, *_ORDERING, *_BATCHING, *_SEARCH, *_PROGRAMS, *_STORES, *_DATA,
    *_INTEROP, *_SYSTEMS, *_RUNTIME, *_PROFILING, *_REPORTS, *_CLI,
)  # fmt: skip

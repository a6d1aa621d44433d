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
_WRITING = (
    _bug("the first of two files stays", "files.py", "        group.vanish()\n        raise", "        raise",
         "a full disk leaves half of what was asked for", "test_files.py", "cli/test_simulate.py"),
    _bug("files appear one by one", "files.py", "    outer = _GROUP.get()\n", "    outer = None\n", "a group is not one", "test_files.py"),
)  # fmt: skip
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
    _bug("dropout is not made up for", "models/modules/dropout.py",
         "return x * keep_mask(row_keys, x.shape[-1], probability, key) / (1 - probability)",
         "return x * keep_mask(row_keys, x.shape[-1], probability, key)", "evaluation sees larger numbers than training",
         "models/modules/test_dropout.py"),
    _bug("weights of equal shape start equal", "models/modules/init.py", "stable_hash(seed, op_name, param_name)",
         "stable_hash(seed, param_name)", "the same on every plan", "models/modules/test_init.py"),
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
    _bug("ZeRO parts leave a rest", "plans/ranks.py", "    width = -(-size // count)", "    width = size // count", "rounded down",
         "runtime/parallel/test_sharding.py", pick="not_divide"),
    _bug("dp and tp ranks are exchanged", "plans/degrees.py", "return index // self._stride(axis) % self.of(axis)",
         "return index % self.of(axis)", "the stride is forgotten", "plans/test_degrees.py"),
    _bug("holders of the same weights: the wrong lane", "plans/degrees.py",
         "return [ranks[first + outer * share + inner * part] for share in range(self.dp) for part in range(self.cp)]",
         "return [ranks[outer * share + inner * part] for share in range(self.dp) for part in range(self.cp)]",
         "gradients of other weights are summed", "plans/test_degrees.py", "plans/test_ranks.py"),
    _bug("ZeRO-3 passes in a pipeline", "plans/validity.py", "if stage.zero > MAX_ZERO_IN_PIPELINE and plan.num_stages > 1:",
         "if stage.zero > MAX_ZERO_IN_PIPELINE and plan.num_stages > 2:", "off by one", "plans/test_validity.py"),
    _bug("chunks may lie on other devices", "plans/validity.py", "if stage.devices != plan.stages[index % groups].devices:",
         "if len(stage.devices) != len(plan.stages[index % groups].devices):", "the schedule takes them for one group",
         "plans/test_validity.py"),
)  # fmt: skip
_COSTS = (
    _bug("a slowed link is slowed again", "costs/speeds.py", " if not cluster.link(*pair).kind.endswith(_SLOWED)]", "]",
         "estimators of estimators differ", "costs/test_speeds.py"),
    _bug("fp32 sums are read like bf16", "costs/roofline.py", "bytes_per_parameter(precision, optimizer, gradients)",
         "bytes_per_parameter(precision, optimizer)", "an update seems to move fewer bytes", "costs/test_roofline.py", pick="optimizer"),
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
    _bug("a ramp begins at its end", "timing/disturbance.py", "(since + 1) / self.steps)", "1.0)", "a ramp is a step",
         "timing/test_disturbance.py"),
    _bug("kernels are compiled for every mixture of arrays", "timing/workload.py", "array.flags.writeable = False",
         "array.flags.writeable = array.base.flags.writeable", "commands wait for a compiler", "timing/test_workload.py"),
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
    _bug("gradients of a stage have the network alone", "timing/estimate.py", "self._trained(part), sharing[index])",
         "self._trained(part), 1)", "other stages sum theirs at the same time", "timing/test_estimate.py"),
    _bug("sums of tied weights are free", "timing/estimate.py", "tied[index] + sync,", "sync,", "their stages wait for them",
         "timing/test_estimate.py"),
    _bug("a split backward lets go too early", "timing/order_memory.py", "INPUT_GRAD: 0, WEIGHT_GRAD: -1}\n_WAITING",
         "INPUT_GRAD: -1, WEIGHT_GRAD: 0}\n_WAITING", "weight gradients still need the activations", "schedules", "timing"),
    _bug("a share of samples is rounded down", "timing/pipeline.py", "rows = -(-samples // dp)", "rows = max(1, samples // dp)",
         "the largest share decides", "timing"),
    _bug("the first group's gradients decide", "timing/estimate.py", "time_s = pipeline + max(sum(_after(stages, group))",
         "time_s = pipeline + min(sum(_after(stages, group))", "the last to end decides", "timing/test_estimate.py"),
    _bug("slower is cheaper", "timing/estimate.py", "self.price_usd * slower", "self.price_usd / slower",
         "a quotient upside down", "timing/test_estimate.py"),
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
    _bug("other cuts forget memory", "search/present_cuts.py",
         "np.where(chain.held_bytes <= limits_bytes[:, None, None], chain.passes_s, np.inf)",
         "chain.passes_s", "plans come out that do not fit", "search/test_present_cuts.py"),
    _bug("plans that do not fit are listed", "search/uniform.py", "        if choice.estimate.fits:", "        if choice.estimate.time_s:",
         "memory is not looked at", "search/test_uniform.py"),
    _bug("a choice dominates itself", "search/money.py", "return all(a <= b * (1 + 1e-9) for a, b in zip(mine, its, strict=True)) and any(",
         "return any(a <= b * (1 + 1e-9) for a, b in zip(mine, its, strict=True)) and any(", "better in one axis is not better",
         "cli/test_pareto.py"),
    _bug("groups of an interleaved pipeline sum over half the network", "search/interleaved/group_links.py",
         "sharing=together, weight_share", "sharing=2 * together, weight_share", "what bounds plans is above them", "search/interleaved"),
    _bug("unequal replicas sum over half the network", "search/replicas/replica_layout.py",
         "[ranks[0] for ranks in stage.devices], sharing)", "[ranks[0] for ranks in stage.devices], 2 * sharing)",
         "what bounds plans is above them", "search/replicas"),
    _bug("simple plans are offered however slow", "search/simplicity.py", "enumerate(times_s) if time_s <= limit_s}", "enumerate(times_s)}",
         "the error is not looked at", "search/test_simplicity.py"),
    _bug("fewer stages are simpler whatever else", "search/simplicity.py",
         "return one != two and all(a <= b for a, b in zip(one, two, strict=True))", "return one < two", "tp instead of stages",
         "search/test_simplicity.py"),
    _bug("the slowest plan first", "search/uniform.py", "return sorted(fitting, key=lambda choice: (choice.estimate.time_s,",
         "return sorted(fitting, key=lambda choice: (-choice.estimate.time_s,", "a sign", "search/test_uniform.py"),
)  # fmt: skip
_PROGRAMS = (
    _bug("a damaged profile is left aside", "programs/memory.py", "except ProfileMissingError:", "except Exception:",
         "bytes by formula in place of an error", "programs/test_memory.py", pick="damaged"),
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
    _bug("memory of the plan's own order", "programs/memory.py", "sum(own.held for own in held.values())",
         "max((own.held for own in held.values()), default=0.0)", "one micro-batch at a time", "programs/test_memory.py"),
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
    _bug("the last, smaller micro-batch is lost", "data/planning.py", "cuts = [*range(first, last, size), last]",
         "cuts = [*range(first, last + 1, size)]",
         "a global batch that does not divide", "data/test_loader.py"),
    _bug("the last epoch's rest is lost", "data/batches.py", "return step * self.samples_per_batch, (step + 1) * self.samples_per_batch",
         "step += step * self.samples_per_batch // self.mixture.epoch_size\n"
         "            return step * self.samples_per_batch, (step + 1) * self.samples_per_batch",
         "batches that do not divide an epoch go on into the next", "data/test_batches.py"),
    _bug("every epoch in the same order", "data/mixture.py", "places = shuffled(places, self.epoch_size, self.seed, epoch)",
         "places = shuffled(places, self.epoch_size, self.seed)", "the epoch is not in the seed", "data/test_mixture.py",
         "data/test_batches.py"),
    _bug("a sample between two batches is lost", "data/batches.py", "self._starts[known] = first + end",
         "self._starts[known] = first + end + 1", "off by one", "data/test_batches.py"),
    _bug("a resumed run starts elsewhere", "data/batches.py", 'self._starts[int(state["step"])] = int(state["position"])',
         'self._starts[int(state["step"])] = int(state["position"]) + 1', "off by one", "data/test_batches.py"),
    _bug("another seed is taken", "data/batches.py", "            if state.get(name) != mine:", "            if state.get(name) is None:",
         "a run goes on with other data", "data/test_batches.py"),
    _bug("limits are ignored", "data/limits.py", "np.minimum(side, limit) for", "np.asarray(side) for",
         "samples are longer than the plan's", "data/test_limits.py", "data/test_batches.py"),
    _bug("pairs that fit are cut", "data/limits.py", "np.maximum(self.together - own[0], self.together // 2)", "self.together // 2",
         "a target has half of the room, whether the input needs the rest or not", "data/test_limits.py"),
    _bug("the target is cut first", "data/limits.py", "np.maximum(self.together - own[0], self.together // 2)",
         "np.maximum(self.together - own[0], 0)", "a long input leaves nothing to learn from", "data/test_limits.py"),
    _bug("the weights of tasks are ignored", "data/mixture.py",
         "return apportion(self.epoch_size, [task.weight or 0.0 for task in self.tasks])",
         "return [task.size for task in self.tasks]", "a mixture is what there is", "data/test_mixture.py"),
)  # fmt: skip
_SERVING = (
    _bug("a stranger is served", "stores/tcp_server.py", "if not is_proof(said[NONCE_BYTES:], self._key, \"client\", mine, its):",
         "if len(said) < NONCE_BYTES:", "the proof is not looked at", "stores/test_tcp.py"),
    _bug("the same challenge for all", "stores/tcp_server.py", "mine = fresh_nonce()", "mine = bytes(NONCE_BYTES)",
         "what was overheard opens the next connection", "stores/test_tcp.py"),
    _bug("any server is believed", "stores/tcp.py", "if not is_proof(answer, self._key, \"server\", its, mine):", "if not answer:",
         "programs go to whoever took the port", "stores/test_tcp.py"),
    _bug("a server's proof is a client's", "stores/proof.py", 'f"penstock {role} ".encode() + server', 'b"penstock " + server',
         "a server can be made to answer for a stranger", "stores/test_tcp.py"),
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
    _bug("who waits is the cause", "runtime/telemetry/parts.py", " - differences[rank][_EFFECT]", "",
         "a slow rank shows as waiting on the others", "runtime/telemetry/test_parts.py"),
    _bug("an update has what it waits for", "runtime/telemetry/observing.py", '            self._sums["update_s"] -= time_s\n', "",
         "ranks that are early seem to update slowly", "runtime/telemetry/test_observing.py"),
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
    _bug("the loss scale never rises", "runtime/optimizing/update.py", "if self.good_steps == self.patience:",
         "if self.good_steps > self.patience * 2:",
         "small gradients vanish", "runtime/optimizing/test_update.py"),
    _bug("ZeRO-1 owners keep their updates", "runtime/parallel/gradients.py", "if bucket.owner is None or len(bucket.ranks) == 1:",
         "if bucket.owner is None or len(bucket.ranks) >= 1:", "ranks drift apart", "runtime/parallel/test_gradients.py"),
    _bug("trained plans need not fit", "runtime/trainer.py", "        require_memory(plan, model, cluster)\n", "        pass\n",
         "the proof is left out", "cli/test_check.py"),
)  # fmt: skip
_GENERATIONS = (
    _bug("a module keeps its group", "runtime/transport/world.py", "partial(self.groups.of, tuple(ranks)))",
         "lambda group=self.groups.of(ranks): group)", "threads and sockets of every generation stay",
         "runtime/transport/test_generations.py", pick="twenty"),
    _bug("generations share their keys", "runtime/transport/generations.py", 'return f"generation/{self.number}"', 'return "generation"',
         "processes find those of a generation that is gone", "runtime/transport/test_generations.py", pick="twenty or closed_one"),
    _bug("masters of several ops lie in one tensor", "runtime/optimizing/update.py", "settings.rate.at(0), op_of)", "settings.rate.at(0))",
         "a cut elsewhere changes bits", "runtime/test_adopting.py", pick="where_stages"),
    _bug("statistics of an abandoned step stay", "runtime/rank.py", "            statistics.copy_(before)\n", "            pass\n",
         "no training loss tells", "runtime/test_rank.py", pick="abandoned"),
    _bug("paced devices are late", "runtime/devices/paced.py", "forgiven_s=math.inf, ", "", "times depend on the machine",
         "runtime/devices/test_paced.py", pick="simulated"),
    _bug("slow links are not", "runtime/devices/clock.py",
         "        time_s *= self.settings.disturbance.link(self.world.rank, step.peer, self._program.iteration)\n", "",
         "a disturbance without effect", "runtime/devices/test_paced.py", pick="disturbed"),
)  # fmt: skip
_TRAINING = (
    _bug("labels weigh a little less", "runtime/source.py", "width, np.float32).div_(loss_tokens)",
         "width, np.float32).div_(loss_tokens + 1)",
         "off by one: the loss of a batch is no mean", "runtime/test_source.py"),
    _bug("images weigh as those of their micro-batch", "runtime/source.py", "1.0 / loss_tokens)\n        return",
         "1.0 / len(samples))\n        return", "a mean of means, times their number", "runtime/test_source.py"),
    _bug("labels weigh as those of their micro-batch", "runtime/source.py", "if alone else (program.loss_tokens, program.num_samples)",
         "if alone or True else (program.loss_tokens, program.num_samples)", "micro-batches of unequal size", "runtime/test_source.py"),
    _bug("evaluation drops out", "runtime/source.py", "program.iteration, seed, program.training", "program.iteration, seed, True",
         "the mode of training stays on", "runtime/test_rank.py"),
    _bug("the same is dropped out in every step", "runtime/source.py", "batch.training = program.iteration, seed,",
         "batch.training = 0, seed,", "a network within the network is trained", "runtime/test_source.py"),
    _bug("evaluation keeps graphs", "runtime/parallel/stage.py", "with torch.set_grad_enabled(training),",
         "with torch.set_grad_enabled(True),", "no_grad is missing: memory as in training", "runtime/parallel/test_stage.py"),
    _bug("the norm is that of the largest share", "runtime/optimizing/update.py", "norm = total[:-2].sum().sqrt() / self._scale_value()",
         "norm = gathered[:, :-2].amax(0).sum().sqrt() / self._scale_value()", "a maximum over ranks where a sum belongs",
         "runtime/parallel/test_gradients.py", pick="clipping"),
    _bug("the norm is that of the scaled loss", "runtime/optimizing/update.py", "norm = total[:-2].sum().sqrt() / self._scale_value()",
         "norm = total[:-2].sum().sqrt()", "clipped to a 65536th", "runtime/optimizing/test_update.py"),
    _bug("the loss scale is taken out twice", "runtime/optimizing/update.py", "factor = torch.full((), 1.0 / self._scale_value(),",
         "factor = torch.full((), 1.0 / self._scale_value() ** 2,", "updates too small to see under AdamW",
         "runtime/optimizing/test_update.py"),
    _bug("small gradients are scaled up", "runtime/optimizing/update.py", ".clamp(max=1.0).float()", ".float()",
         "clipping has no upper end",
         "runtime/optimizing/test_update.py"),
    _bug("a dropped step keeps its gradients", "runtime/optimizing/update.py",
         "            self._zero()\n            return StepResult(total[-1], norm, rate, total[-2], gathered, skipped=True)",
         "            return StepResult(total[-1], norm, rate, total[-2], gathered, skipped=True)", "the next step has them too",
         "runtime/test_divergence.py", pick="skipped"),
    _bug("the learning rate starts anew", "runtime/optimizing/update.py", "        rate = self.settings.rate.at(iteration)",
         "        self._since = getattr(self, '_since', -1) + 1\n        rate = self.settings.rate.at(self._since)",
         "warm-up again after every resume", "runtime/test_rank_state.py", pick="same_curve"),
    _bug("the learning rate is a step late", "runtime/optimizing/update.py", "        rate = self.settings.rate.at(iteration)",
         "        rate = self.settings.rate.at(max(0, iteration - 1))", "off by one", "runtime/optimizing/test_update.py"),
    _bug("a resumed optimizer is a step ahead", "runtime/optimizing/optimizer.py",
         "{name: value.to(parameter.device).clone() for", "{name: value.to(parameter.device) + (value.dim() == 0) for",
         "Adam's correction of the beginning is off", "runtime/optimizing/test_update.py", "runtime/test_rank_state.py"),
    _bug("a resumed half-precision optimizer is a step ahead", "runtime/optimizing/optimizer.py",
         "                    kept[name] = value.clone()\n",
         "                    kept[name] = value + 1\n", "Adam's correction of the beginning is off", "runtime/optimizing/test_update.py"),
    _bug("every rank has weights of its own", "runtime/rank.py", "self.transport, seed=self.settings.seed,\n",
         "self.transport, seed=self.settings.seed + self.world.rank,\n", "replicas and tensor-parallel parts start apart",
         "runtime/parallel/test_gradients.py"),
    _bug("the norm counts what others own", "runtime/parallel/gradients.py",
         "first = bucket.ranks[0] if bucket.owner is None else bucket.owner", "first = bucket.ranks[0]",
         "ZeRO-1: only owners have the sums", "runtime/parallel/test_gradients.py"),
    _bug("the norm counts shared weights twice", "runtime/parallel/gradients.py", "not whole_elsewhere and not copy_of_tied:",
         "not whole_elsewhere:", "both stages have the whole sum", "runtime/parallel/test_gradients.py"),
    _bug("the norm counts undivided weights twice", "runtime/parallel/gradients.py",
         "whole_elsewhere = not held.divided and held.module.tp.rank > 0", "whole_elsewhere = False", "every tp rank has them",
         "runtime/parallel/test_gradients.py"),
    _bug("statistics are summed", "runtime/parallel/gradients.py", "(flat / count).split(", "flat.split(",
         "running statistics grow with dp", "runtime/parallel/test_gradients.py", pick="statistics"),
    _bug("the last share of a shared weight wins", "runtime/parallel/tied.py", "_rows(gradient, source).add_(got[source])",
         "_rows(gradient, source).copy_(got[source])", "the stage's own share is lost", "runtime/parallel/test_gradients.py",
         pick="clipping"),
    _bug("parts of a shared weight are not looked for", "runtime/parallel/tied.py",
         "return tensor if which.rows is None else tensor[which.rows[0] : which.rows[1]]",
         "return tensor if which.rows is None else tensor[: which.rows[1] - which.rows[0]]", "right where tp is the same on both ends",
         "runtime/test_transparency.py", pick="covering"),
    _bug("ranks meet on all interfaces", "runtime/transport/rendezvous.py",
         "is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=limit)",
         "is_master=True, wait_for_workers=False, timeout=limit) if not listener.close() else None  # type: ignore[func-returns-value]",
         "what a TCPStore does by itself", "runtime/transport/test_rendezvous.py"),
    _bug("one checkpoint too few is kept", "runtime/checkpoints/folder.py", "whole_checkpoints(folder)[:-keep]",
         "whole_checkpoints(folder)[: 1 - keep or None]", "off by one", "runtime/checkpoints/test_checkpoints.py", pick="kept"),
    _bug("the best checkpoint goes with the others", "runtime/checkpoints/folder.py", "if best is None or path != best[0]:", "if path:",
         "only the last ones are kept", "runtime/checkpoints/test_checkpoints.py", pick="kept"),
    _bug("a run goes on from its first checkpoint", "runtime/checkpoints/folder.py", "next(reversed(whole_checkpoints(folder)), None)",
         "next(iter(whole_checkpoints(folder)), None)", "steps are trained twice", "runtime/checkpoints/test_checkpoints.py"),
    _bug("checkpoints may cost anything", "runtime/checkpoints/intervals.py", "max(self.longest_s, self._stood_s / self.share)",
         "min(self.longest_s, self._stood_s / self.share)", "one after each step", "runtime/checkpoints/test_intervals.py"),
    _bug("a signal must reach all ranks", "runtime/run.py", "self.world.gather(torch.tensor(own)).amax(0)",
         "self.world.gather(torch.tensor(own)).amin(0)", "one rank alone is asked to end", "runtime/checkpoints/test_intervals.py"),
    _bug("updates dropped long ago count", "runtime/run.py", "            self._dropped = 0\n            return\n", "            return\n",
         "the fifth of a week ends the run", "runtime/test_divergence.py"),
    _bug("a run resumes a step late", "runtime/run.py", "self.first_step = Checkpoint(request.resume).step if",
         "self.first_step = Checkpoint(request.resume).step + 1 if", "off by one: a batch is never seen", "runtime/test_trainer.py",
         pick="goes_on_under"),
    _bug("MFU counts the forward pass alone", "runtime/telemetry/flops.py", "np.array((op.flops.form(1) + op.backward_flops.form(1)).coeff",
         "np.array((op.flops.form(1)).coeff", "a third of the truth", "runtime/telemetry"),
    _bug("what was trained is evaluated", "runtime/run.py", 'source = batch_source(self.request, "validation")',
         "source = batch_source(self.request)", "the loss that is told is too good", "runtime/test_run.py"),
)  # fmt: skip
_PROCESSES = (
    _bug("processes have the server's environment", "processes/fork_server.py", "os.environ.update(environment)", "os.environ.update({})",
         "what was set after the server began is not seen", "processes/test_fork_server.py"),
    _bug("a script without a guard trains", "processes/main_guard.py", 'if "__name__" not in text:', 'if "__name__" in text:',
         "every rank begins a training of its own", "processes/test_main_guard.py"),
)  # fmt: skip
_RULES = (
    _bug("SGD forgets its momentum",
         "runtime/optimizing/update_rules.py", 'state["momentum_buffer"] = moment', 'state["momentum"] = moment',
         "another name than torch's", "runtime/optimizing/test_update_rules.py"),
)
_PROFILING = (
    _bug("a transfer there and back is one", "profiling/links.py", '/ (2 if kind == "transfer" else 1)', "/ 1",
         "links seem half as fast", "profiling/test_links.py", pick="message"),
    _bug("a shortened model is whole", "profiling/measure.py", "(block, min(count, copies)) for", "(block, max(count, copies)) for",
         "profiles take for ever", "profiling/test_measure.py", pick="shortened"),
)  # fmt: skip
_REPORTS = (
    _bug("times beyond the end are drawn", "reports/drawing.py", "min(until_s, makespan_s)", "max(until_s, makespan_s)",
         "the cut is ignored", "reports/test_drawing.py"),
)
_CLI = (
    _bug("a simple plan hides the fastest", "cli/search_lengths.py", "top=max(2, top)", "top=top", "nobody says why it is first",
         "cli/test_search.py", pick="says_why"),
    _bug("beaten choices are shown first", "cli/pareto.py", "key=lambda offer: (bool(offer.dominated_by), offer.hours)",
         "key=lambda offer: (not offer.dominated_by, offer.hours)", "a sign", "cli/test_pareto.py"),
    _bug("names of nodes are paths", "cli/pareto.py", 're.sub(r"[^A-Za-z0-9._-]+", "_", name)', 'name.replace("+", "_")',
         "files land outside of the folder", "cli/test_pareto.py"),
    _bug("names of nodes are formulas", "cli/pareto.py", ', parse_math=False)', ")", "the chart fails", "cli/test_pareto.py"),
    _bug("beaten choices are always shown", "cli/pareto.py", 'if dominated or not row["dominated_by"]]', "]",
         "the option does nothing", "cli/test_pareto.py"),
    _bug("checked plans need not fit", "cli/check.py", "        require_memory(found, model, cluster)\n", "", "the proof is left out",
         "cli/test_check.py"),
)  # fmt: skip

_ADAPTING = (
    _bug("a move forgets what arrives", "adapting/moves.py",
         "self.before_bytes.get(rank, 0) + self.arriving_bytes.get(rank, 0)", "self.before_bytes.get(rank, 0)",
         "no room during the move", "adapting/test_moves.py"),
    _bug("weights travel beside their masters", "adapting/moves.py", "if region := outside(one.region, masters):",
         "if region := outside(one.region, ()):", "more bytes than are needed", "adapting/test_moves.py"),
    _bug("senders on other nodes serve as well", "adapting/moves.py",
         "(self.cluster.node_index(source) != node, self.sent[source], source, shared)",
         "(False, self.sent[source], source, shared)", "slow links are used without need", "adapting/test_moves.py", pick="same_node"),
    _bug("owners of shared weights keep their state alone", "adapting/holdings.py",
         "if place.op.trainable and place.name not in self.layouts.shared and not place.op.tied_to:", "if place.op.trainable:",
         "the runtime updates them everywhere", "adapting/test_moves.py", pick="runtime"),
    _bug("lengths of samples raise alarms", "adapting/detecting.py", "common = _common(ratios) if len(ratios) > 1 else 0.0", "common = 0.0",
         "what all ranks share is not taken off", "adapting/test_detecting.py"),
    _bug("hiccups add up", "adapting/detecting.py", "(ratios - self.level) / self._scale, -CLIP, CLIP)",
         "(ratios - self.level) / self._scale, -99.0, 99.0)", "one late step is taken for a slow rank", "adapting/test_detecting.py"),
    _bug("recovery is not seen", "adapting/detecting.py", "np.maximum(0.0, self._down - z - DRIFT)",
         "np.maximum(0.0, self._down + z - DRIFT)",
         "a sign", "adapting/test_detecting.py"),
    _bug("intervals forget what passes cannot tell", "adapting/slowdowns.py", "+ np.eye(len(classes)) / prior**2)",
         "+ np.eye(len(classes)) / (1e-3 * prior) ** 2)", "classes seem to be known where shapes are fixed", "adapting/test_slowdowns.py"),
    _bug("a move need not come back", "adapting/deciding.py", "2 * chosen.pause_s", "chosen.pause_s", "half the cost",
         "adapting/test_deciding.py"),
    _bug("moves that did not pay are forgotten", "adapting/deciding.py", "else self._unpaid + 1\n        self._before, self.plan",
         "else 0\n        self._before, self.plan", "a run flaps", "adapting/test_deciding.py"),
    _bug("refused remedies are taken", "adapting/deciding.py", "[option for option in options if not option.refused]", "list(options)",
         "a plan without room is moved to", "adapting/test_deciding.py"),
    _bug("slow devices replace slow ones", "adapting/ladder.py", "and not _is_slow(speeds, [rank])]", "]", "a free device is not looked at",
         "adapting/test_ladder.py"),
    _bug("data that comes late changes plans", "adapting/adapter.py",
         "if (usual := _on_grid(factor)) != 1.0:", "if (usual := _on_grid(factor)):",
         "ranks that nothing slows have times of their own", "adapting/test_adapter.py"),
)  # fmt: skip

PLANTED = (
    *_GROUND, *_WRITING, *_CLUSTERS, *_MODELS, *_SCHEDULES, *_PLANS, *_COSTS, *_TIMING, *_ORDERING, *_BATCHING, *_SEARCH, *_PROGRAMS,
    *_STORES, *_SERVING, *_DATA, *_INTEROP, *_SYSTEMS, *_PROCESSES, *_RUNTIME, *_GENERATIONS, *_TRAINING, *_RULES, *_PROFILING, *_REPORTS,
    *_CLI, *_ADAPTING,
)  # fmt: skip

"""Run by DynaPipe's interpreter, never imported here: plans batches with DynaPipe's planner, as its data loader does.

Reads one JSON object from standard input and prints one line of JSON for each batch: milliseconds of its slowest replica by DynaPipe's
simulator, and the processor seconds of planning. Cost tables come as rows and become a cost model of DynaPipe's own class.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

_SEED = 0
"""DynaPipe shuffles micro-batches without a seed of its own."""


def main() -> None:
    """Plans every batch of the request."""
    request = json.load(sys.stdin)
    sys.path.insert(0, request["checkout"])
    _adapt_elkai()
    planner = _Planner(request)
    for samples in request["batches"]:
        print(json.dumps(planner.planned(samples)), flush=True)


def _adapt_elkai() -> None:
    """DynaPipe asks its own fork of elkai for a sum of distances; the published package knows only that one."""
    import elkai  # type: ignore[import-not-found]

    plain = elkai.solve_int_matrix
    elkai.solve_int_matrix = lambda matrix, runs, bottleneck=False: plain(matrix.tolist(), runs)


def _cost_model(points: list[list[Any]], sizes: list[list[Any]]) -> Any:
    """DynaPipe's cost model from rows (tp, mode, component, micro-batch, lengths, forward, backward, stored, peak) and sizes of layers.

    What was not measured is None.
    """
    from dynapipe.data_opt.cost_models import ProfileBasedCostModel, ProfileBasedCostModelWithRC  # type: ignore[import-not-found]

    found: dict[tuple[int, str], tuple[dict[Any, Any], ...]] = {}
    for tp, mode, component, samples, lengths, forward, backward, stored, peak in points:
        times, kept, peaks, _, best = found.setdefault((tp, mode), ({}, {}, {}, {}, {}))
        at = tuple(lengths) if component == "decoder" else lengths[0]
        for way, cost in (("forward", forward), ("backward", backward)):
            if cost is not None:
                times.setdefault((component, way), {}).setdefault(at, []).append((samples, cost, samples * lengths[-1] / cost))
                best.setdefault((component, way), {})[at] = 0.0
        for table, megabytes in ((kept, stored), (peaks, peak)):
            if component != "postprocess" and megabytes is not None:
                table.setdefault(component, {}).setdefault(at, []).append((samples, megabytes))
    for tp, mode, component, megabytes in sizes:
        if (tp, mode) in found:
            found[tp, mode][3][component] = megabytes
    costs = ProfileBasedCostModelWithRC(_serialized_cms={})
    names = ("_timing_data", "_stored_activation_data", "_peak_activation_data", "_model_state_data", "_max_throughput_achieved")
    costs.cost_models = {key: ProfileBasedCostModel(**dict(zip(names, value, strict=True))) for key, value in found.items()}
    return costs


class _Planner:
    """DynaPipe's two steps, micro-batches and then a schedule of each replica, with the settings of its data loader."""

    def __init__(self, request: dict[str, Any]) -> None:
        from dynapipe.data_opt.optimizer import DataAssignmentOptimizer  # type: ignore[import-not-found]
        from dynapipe.model import DynaPipeCluster, TransformerModelSpec  # type: ignore[import-not-found]
        from dynapipe.schedule_opt.execution_planner import ExecutionPlanner  # type: ignore[import-not-found]

        config, links = request["config"], request["links"]
        layers, stages, tp = config["layers"], config["pp"], config["tp"]
        self.has_decoder = bool(request["has_decoder"])
        self.offset = 0 if self.has_decoder else 1
        self.multiple, self.extra = int(links["round_seqlen_multiple"]), int(links["extra_decoder_tokens"])
        spec = TransformerModelSpec(layers, layers if self.has_decoder else 0, request["hidden"], 1, 1, 1)
        costs = _cost_model(request["points"], request["sizes"])
        nodes = dict(enumerate(request["nodes"]))
        cluster = DynaPipeCluster(
            nodes, [config["mem"]] * stages, links["intra_node_gbit_per_s"], links["inter_node_gbit_per_s"],
            links["intra_node_latency_us"], links["inter_node_latency_us"],
        )  # fmt: skip
        total = layers * (2 if self.has_decoder else 1)
        assignment = [layer * stages // total for layer in range(total)]
        alone = self.has_decoder and stages == 1  # its partition takes encoder and decoder for devices of their own, unless told of chunks
        shared = {"dp_size": config["dp"], "tp_size": tp, "zero_stage": config["zero"]}
        self.splitter = DataAssignmentOptimizer(
            costs, spec, stages, total // stages // (2 if alone else 1), n_chunks_per_device=2 if alone else 1,
            device_memory_limit=config["mem"], round_seqlen_multiple=self.multiple, seqlen_offset=self.offset, **shared,
        )  # fmt: skip
        self.planner = ExecutionPlanner(cluster, spec, assignment, config["mem"], costs, **shared)

    def planned(self, samples: list[list[int]]) -> dict[str, Any]:
        """The slowest replica of one batch."""
        import numpy

        numpy.random.seed(_SEED)
        start = time.process_time()
        decoder = [dec for _, dec in samples] if self.has_decoder else None
        _, replicas, *_ = self.splitter.generate_microbatches([enc for enc, _ in samples], decoder_sample_sequence_lengths=decoder)
        if replicas is None:
            return {"ms": None, "cpu_s": time.process_time() - start}
        times = [self.planner.generate_execution_plan([self._shape(one, samples) for one in replica])[1] for replica in replicas]
        return {"ms": max(times), "cpu_s": time.process_time() - start}

    def _shape(self, micro_batch: list[list[int]], samples: list[list[int]]) -> tuple[int, int, int]:
        rows = [samples[index] for row in micro_batch for index in row]
        decoder = self._rounded(max(dec for _, dec in rows) + self.extra) if self.has_decoder else 0
        return len(micro_batch), self._rounded(max(enc for enc, _ in rows)), decoder

    def _rounded(self, length: int) -> int:
        return -(-(length - self.offset) // self.multiple) * self.multiple


if __name__ == "__main__":
    main()

"""Records of a run's steps: a line each in `steps.jsonl`, and a message to the launcher with the notes since the last one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from penstock.runtime.request import EvalRecord, StepReport
from penstock.runtime.run_folder import STEPS, plans_of_run
from penstock.runtime.telemetry.nvml import DeviceLog, NvmlMissing, gpu_uuid
from penstock.runtime.telemetry.spans import SpanRecorder
from penstock.runtime.telemetry.steps import LineLog, StepRecord
from penstock.runtime.telemetry.tensorboard import tensorboard_sink
from penstock.runtime.worker import Worker

__all__ = ["RunRecords", "TrainedStep", "report_of"]


@dataclass(frozen=True)
class TrainedStep:
    """A step as all processes know it."""

    record: StepRecord
    samples: str
    """Digest of all that were trained."""
    evaluated: EvalRecord | None = None


class RunRecords:
    """The records of one process: each keeps the figures of all steps and samples its GPU, the first of the job writes and tells them."""

    def __init__(self, worker: Worker, out: Path, spans: SpanRecorder, *, is_first: bool, anew: bool) -> None:
        self.losses: list[float] = []
        self.times_s: list[float] = []
        self.tokens: list[int] = []
        self.evaluated: list[EvalRecord] = []
        self.plan_number = len(plans_of_run(out)) - 1 if is_first else 0
        """How many plans the run has had before the one in force, as far as the first process knows."""
        self._worker, self._spans = worker, spans
        self._log: LineLog | None = None
        if is_first:
            sink = tensorboard_sink(out / "tensorboard")
            self._log = LineLog(out / STEPS, *([] if sink is None else [sink]), anew=anew)
        self._notes: list[str] = []
        """Those that the launcher has not been told yet."""
        self._noted: set[str] = set()
        """Topics of which nothing more is said."""
        self._gpu = self._gpu_log(out)

    def close(self) -> None:
        """Ends the threads that sample and write."""
        if self._gpu is not None:
            self._gpu.close()
        if self._log is not None:
            self._log.close()

    def flush(self) -> None:
        """Returns when all steps told so far are in their file."""
        if self._log is not None:
            self._log.flush()

    def note(self, *notes: str) -> None:
        """Has the launcher told with the next step."""
        if self._log is not None:
            self._notes += notes

    def note_once(self, topic: str, note: str) -> None:
        """Notes something, unless anything of that topic was noted before."""
        if topic not in self._noted:
            self._noted.add(topic)
            self.note(note)

    def tell(self, trained: TrainedStep) -> None:
        """Keeps a step that all have ended; the first process writes it down and tells the launcher of it."""
        record = trained.record
        loss = math.nan if record.loss is None else record.loss
        self.losses.append(loss)
        self.times_s.append(record.time_s or 0.0)
        self.tokens.append(record.tokens or 0)
        if (evaluated := trained.evaluated) is not None:
            self.evaluated.append(evaluated)
            record = msgspec.structs.replace(record, held_out_loss=evaluated.loss, held_out_accuracy=evaluated.accuracy)
        if self._log is None:
            return
        record = msgspec.structs.replace(record, samples=trained.samples, plan=self.plan_number)
        self._log.write(record)
        self._note_silence((("steps", self._log.error), ("spans", self._spans.error)))
        rate = record.tokens_per_s or 0.0
        self._worker.tell(StepReport(record.step, loss, rate, record.gpu_utilisation, evaluated, tuple(self._notes)))
        self._notes.clear()

    def _note_silence(self, errors: Iterable[tuple[str, object]]) -> None:
        """Notes once for each kind of record that it is no longer written, as on a full disk."""
        for what, error in errors:
            if error is not None:
                self.note_once(what, f"{what} are no longer recorded: {error}.")

    def gpu_sample(self) -> dict[str, float | None]:
        """Use, clock and power of this process' GPU, as NVML last had them, as fields of a record."""
        now = None if self._gpu is None else self._gpu.latest
        if now is None:
            return {}
        return {"gpu_utilisation": now.utilisation, "gpu_sm_clock_hz": now.sm_clock_hz, "gpu_power_w": now.power_w}

    def _gpu_log(self, out: Path) -> DeviceLog | None:
        """The thread that samples this process' GPU, if it has one that no process before it samples."""
        worker = self._worker
        uuid = gpu_uuid(worker.groups.device)
        if uuid is None or (worker.shared_gpu and worker.rank >= torch.cuda.device_count()):
            return None
        try:
            return DeviceLog(uuid, out / f"rank-{worker.rank:05d}.devices.jsonl")
        except NvmlMissing as error:
            self.note(f"no GPU utilisation, clocks and power are recorded: {error}.")
            return None


def report_of(record: StepRecord) -> StepReport:
    """What a launcher hears of a step, out of the line that the run's folder has of it."""
    evaluated = None
    if record.held_out_loss is not None:
        accuracy = math.nan if record.held_out_accuracy is None else record.held_out_accuracy
        evaluated = EvalRecord(record.step + 1, record.held_out_loss, accuracy)
    return StepReport(record.step, record.loss, record.tokens_per_s or 0.0, evaluated=evaluated)

"""What the matrix products of a training step take alone, on one GPU under lasting load: the bound that its power limit sets to any step.

    python benchmarks/products.py [--tokens 65536] [--steps 7]

The products are those of the GPT of `throughput.py`, of normal values in bf16, issued without anything between them: forward, and of inputs
and weights backward, the latter added to sums. Printed are milliseconds of a step, the tokens a second that would be if nothing else were
done, and power and clocks meanwhile, by `nvidia-smi`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

HIDDEN, LAYERS, VOCAB = 2048, 24, 50_304
PRODUCTS = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
"""(outputs, inputs) of a layer's."""
SETTLED_S = 1.0
"""After which clocks are those of lasting load."""


@dataclass(frozen=True)
class Weight:
    """A weight, and the sums of its gradients."""

    value: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
        return cls(_normal(outputs, inputs, 0.02), torch.zeros(outputs, inputs, dtype=dtype, device="cuda"))


def _normal(rows: int, columns: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") * spread


class Step:
    """All products of a step, in micro-batches of so many tokens."""

    def __init__(self, tokens: int, micro_batches: int, sums: torch.dtype) -> None:
        self.micro_batches = micro_batches
        self.weights = [Weight.of(*sizes, sums) for _ in range(LAYERS) for sizes in PRODUCTS]
        self.head = Weight.of(VOCAB, HIDDEN, sums)
        widths = {HIDDEN, *(width for sizes in PRODUCTS for width in sizes), VOCAB}
        self.values = {width: _normal(tokens, width, 1.0) for width in widths - {VOCAB}}
        self.gradients = {width: _normal(tokens, width, 1e-3) for width in widths}
        self.results = {width: torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda") for width in widths}

    def run(self) -> None:
        for _ in range(self.micro_batches):
            chain = [*self.weights, self.head]
            for weight in chain:
                outputs, inputs = weight.value.shape
                torch.mm(self.values[inputs], weight.value.t(), out=self.results[outputs])
            for weight in reversed(chain):
                outputs, inputs = weight.value.shape
                gradient = self.gradients[outputs]
                torch.mm(gradient, weight.value, out=self.results[inputs])
                if weight.total.dtype == gradient.dtype:
                    weight.total.addmm_(gradient.t(), self.values[inputs])
                else:
                    torch.addmm(weight.total, gradient.t(), self.values[inputs], out_dtype=weight.total.dtype, out=weight.total)


@dataclass
class Watched:
    """(moment, watts, MHz) of the GPU."""

    seen: list[tuple[float, float, float]] = field(default_factory=list)

    def since(self, start: float) -> str:
        known = [one[1:] for one in self.seen if one[0] > start + SETTLED_S]
        if not known:
            return "unknown"
        watts, clock = (statistics.mean(column) for column in zip(*known, strict=True))
        return f"{watts:.0f} W, {clock:.0f} MHz"


@contextmanager
def watched() -> Iterator[Watched]:
    """Asks the driver five times a second."""
    words = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits", "-lms", "200"]
    found = Watched()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            for line in process.stdout or ():
                watts, clock = map(float, line.split(","))
                found.seen.append((time.perf_counter(), watts, clock))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield found
        finally:
            process.terminate()
            reader.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**16)
    parser.add_argument("--steps", type=int, default=7)
    given = parser.parse_args()
    flops = 6 * given.tokens * (LAYERS * sum(outputs * inputs for outputs, inputs in PRODUCTS) + VOCAB * HIDDEN)
    print("| micro-batches | sums | a step | TFLOP/s | tokens/s | meanwhile |\n|---|---|---|---|---|---|", flush=True)
    with watched() as device:
        for count, sums in ((4, torch.float32), (2, torch.float32), (1, torch.float32), (4, torch.bfloat16)):
            step = Step(given.tokens // count, count, sums)
            for _ in range(2):
                step.run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(given.steps):
                step.run()
            torch.cuda.synchronize()
            step_s = (time.perf_counter() - start) / given.steps
            print(f"| {count} × {given.tokens // count:,} | {str(sums).removeprefix('torch.')} | {step_s * 1e3:.0f} ms "
                  f"| {flops / step_s / 1e12:.0f} | {given.tokens / step_s:,.0f} | {device.since(start)} |", flush=True)  # fmt: skip
            del step
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""A short form of `benchmarks/interference.py`: classes of ops predict another model's stages better than one slow-down for all."""

from __future__ import annotations

from pathlib import Path

from benchmark_modules import load_benchmark


def test_classes_predict_better_than_one_slow_down() -> None:
    found = load_benchmark("interference").simulated_errors(num_loads=30, num_passes=48)
    assert found["classes"] <= 0.7 * found["scalar"] < found["scalar"] < found["constant"]
    assert 0.8 <= found["covered"] <= 0.97


def test_a_forest_learns_what_there_is_to_learn(tmp_path: Path) -> None:
    """Slow-downs that one counter explains, at four batch sizes: the forest is better than a constant."""
    rows = [[*[float((number * 7 + at) % 11) for at in range(26)], float(number % 4), 0, 0, 0, 0, 0, 1.05 + 0.05 * ((number * 7) % 11)]
            for number in range(120)]  # fmt: skip
    file = tmp_path / "data.csv"
    file.write_text("\n".join(",".join(map(str, row)) for row in [list(range(33)), *rows]), encoding="utf-8")
    found = load_benchmark("interference").forest_errors(file, num_trees=8)
    assert found["forest"] < 0.5 * found["constant"]

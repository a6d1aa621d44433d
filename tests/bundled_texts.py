"""Writes the bundled text set: six tasks whose answers follow from their questions, lengths spread as in instruction data.

    python tests/bundled_texts.py src/penstock/data/bundled

The number of words of an input is log-normal, with its own median and spread for each task: most are short, a few are very long.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["TASKS", "generate"]

_SEED = 20240501
_LONGEST_WORDS = 1200


def _words(text: str) -> list[str]:
    return text.split()


_PEOPLE = _words("Ada Bruno Chidi Dalia Emeka Farah Goran Hana Imre Jana Kofi Lena Mila Nuno Olga Pavel Qadir Rosa Sven Tala Uma Vera")
_PLACES = _words("harbour market library station garden bridge mill tower bakery museum orchard valley school theatre lighthouse quarry")
_THINGS = _words("lamp ladder violin basket map kettle clock rope lantern barrel mirror wagon candle drum saddle anchor compass blanket")
_COLOURS = _words("red blue green yellow grey black white brown orange purple")
_VERBS = _words("carried painted lost found repaired sold bought borrowed hid polished")
_TIMES = ("in the morning", "at noon", "in the evening", "before dawn", "after the rain", "on market day", "last winter", "during the fair")
_GOOD = _words("bright friendly careful generous clear warm reliable charming fresh calm")
_BAD = _words("noisy late broken dull careless cold stale rude muddy tiresome")
_SUBJECTS = _words("room food service view music staff journey guide price garden")
_DIGITS = _words("zero one two three four five six seven eight nine")


class TextTask(NamedTuple):
    """How many samples, how long their inputs are, and what makes one of about so many words."""

    samples: int
    median_words: float
    spread: float
    make: Callable[[random.Random, int], tuple[str, str]]


def _sentence(rng: random.Random) -> tuple[str, str, str, str]:
    """A small event: the sentence, and who, what and where."""
    who, what, where = rng.choice(_PEOPLE), f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}", rng.choice(_PLACES)
    return f"{who} {rng.choice(_VERBS)} the {what} near the {where} {rng.choice(_TIMES)}.", who, what, where


def _story(rng: random.Random, words: int) -> list[tuple[str, str, str, str]]:
    events: list[tuple[str, str, str, str]] = []
    while sum(len(event[0].split()) for event in events) < words:
        events.append(_sentence(rng))
    return events


def _reading(rng: random.Random, words: int) -> tuple[str, str]:
    events = _story(rng, words)
    _, who, what, where = rng.choice(events)
    matches = sorted({event[3] for event in events if event[1] == who and event[2] == what})
    text = " ".join(event[0] for event in events)
    return f"{text}\n\nNear what place was {who} with the {what}?", " and ".join(f"the {place}" for place in matches) or f"the {where}"


def _summary(rng: random.Random, words: int) -> tuple[str, str]:
    events = _story(rng, words)
    people = list(dict.fromkeys(event[1] for event in events))
    lines = []
    for person in people[:12]:
        things = list(dict.fromkeys(event[2] for event in events if event[1] == person))
        lines.append(f"{person}: {', '.join(things[:4])}.")
    return "List who had which things.\n\n" + " ".join(event[0] for event in events), " ".join(lines)


def _sums(rng: random.Random, words: int) -> tuple[str, str]:
    numbers = [rng.randint(1, 99) for _ in range(max(2, words // 2))]
    signs = [rng.choice("+-") for _ in numbers[1:]]
    total = numbers[0] + sum(n if sign == "+" else -n for n, sign in zip(numbers[1:], signs, strict=True))
    return f"What is {numbers[0]}" + "".join(f" {sign} {n}" for n, sign in zip(numbers[1:], signs, strict=True)) + "?", str(total)


def _sorting(rng: random.Random, words: int) -> tuple[str, str]:
    chosen = [rng.choice(_THINGS + _PLACES + _COLOURS) for _ in range(max(3, words))]
    return "Put these words in alphabetical order, each once: " + ", ".join(chosen) + ".", ", ".join(sorted(set(chosen)))


def _opinion(rng: random.Random, words: int) -> tuple[str, str]:
    good = rng.random() < 0.5
    parts: list[str] = []
    while sum(len(part.split()) for part in parts) < words:
        fits = rng.random() < 0.8
        parts.append(f"The {rng.choice(_SUBJECTS)} was {rng.choice(_GOOD if fits == good else _BAD)}.")
    score = sum(1 if part.split()[-1].rstrip(".") in _GOOD else -1 for part in parts)
    answer = "positive" if score > 0 else "negative" if score < 0 else "mixed"
    return "Is this review positive, negative or mixed?\n\n" + " ".join(parts), answer


def _spelling(rng: random.Random, words: int) -> tuple[str, str]:
    digits = [rng.randint(0, 9) for _ in range(max(2, words))]
    return "Write the digits as words: " + " ".join(map(str, digits)), " ".join(_DIGITS[digit] for digit in digits)


TASKS = {
    "opinions": TextTask(340, 28, 0.8, _opinion),
    "reading": TextTask(240, 75, 1.0, _reading),
    "sorting": TextTask(240, 14, 0.7, _sorting),
    "spelling": TextTask(240, 16, 0.8, _spelling),
    "summaries": TextTask(100, 120, 0.9, _summary),
    "sums": TextTask(420, 8, 0.6, _sums),
}


def generate(folder: Path) -> None:
    """Writes one JSONL file for each task; the same bytes every time."""
    for name, task in TASKS.items():
        rng = random.Random(f"{_SEED} {name}")
        lines: dict[str, None] = {}
        while len(lines) < task.samples:
            words = min(_LONGEST_WORDS, max(1, round(task.median_words * rng.lognormvariate(0, task.spread))))
            text, answer = task.make(rng, words)
            lines[json.dumps({"input": text, "target": answer}, ensure_ascii=False)] = None
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))

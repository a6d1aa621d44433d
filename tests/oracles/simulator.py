"""The simulator as slow plain Python: repeat until nothing changes, one action at a time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedules.actions import Schedule


def simulate_slowly(schedule: Schedule, durations: Sequence, transfers: Sequence) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(kind, stage, micro-batch) → (start, end); actions that can never run are missing."""
    last = len(durations[0]) - 1
    done: dict[tuple[int, int, int], tuple[float, float]] = {}
    waiting = [list(actions) for actions in schedule]
    free = [0.0] * len(schedule)
    progress = True
    while progress:
        progress = False
        for device, actions in enumerate(waiting):
            if not actions:
                continue
            stage, kind, m = actions[0]
            needs = []
            if kind == 0 and stage > 0:
                needs.append(((0, stage - 1, m), transfers[0][stage - 1][m]))
            if kind in (1, 2):
                needs.append(((0, stage, m), 0.0))
                if stage < last:
                    producer = (2, stage + 1, m) if (2, stage + 1, m) in done else (1, stage + 1, m)
                    needs.append((producer, transfers[1][stage][m]))
            if kind == 3:
                needs.append(((2, stage, m), 0.0))
            if any(producer not in done for producer, _ in needs):
                continue
            start = max([free[device], *(done[producer][1] + delay for producer, delay in needs)])
            done[kind, stage, m] = start, start + durations[kind][stage][m]
            free[device] = done[kind, stage, m][1]
            actions.pop(0)
            progress = True
    return done

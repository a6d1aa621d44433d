"""Names of the parts of a step, a save, a move and a recovery, besides the instructions of a program: what a fault can be asked for in."""

from __future__ import annotations

__all__ = ["COMMITTING", "COPYING", "GATHERED", "MOVING", "RECOVERING", "SAVING", "SHARING"]

GATHERED, SHARING = "gathered", "sharing"
"""An update once the norm of all gradients is known, and before weights are shared that are divided under ZeRO."""
SAVING, COPYING = "saving", "copying"
"""A checkpoint that is begun, and copies that are half made."""
MOVING, COMMITTING = "moving", "committing"
"""A move that is prepared, and one that would be in force next."""
RECOVERING = "recovering"
"""A process that goes on in place of one that died, before its first step."""

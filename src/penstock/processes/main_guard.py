"""Scripts that train must not train again when the processes that they start import them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from penstock.errors import InputError

__all__ = ["require_guarded_main"]


def require_guarded_main() -> None:
    """Refuses a script that trains from its top level without asking for its own name: ranks and planners import it, and would each begin
    a training of their own, forever."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if main is None or file is None or not _called_from_top(sys._getframe(), vars(main)):
        return
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:  # a program that was packed into one file
        return
    if "__name__" not in text:
        raise InputError(
            f"script '{file}' trains as soon as it is imported, as every process that it starts does. Put what it does into a function, "
            'and call that below `if __name__ == "__main__":`.'
        )


def _called_from_top(frame: FrameType | None, names: dict[str, object]) -> bool:
    """Whether the top level of the main script is among the callers."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is names:
            return True
        frame = frame.f_back
    return False

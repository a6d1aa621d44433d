"""Independent programs that score plans and batches, named by `--judge FILE`; they are not part of this repository."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_judge(path: Path | None) -> Any:
    """The scoring program as a module; None where none is named. A name without a file ends the benchmark: it would seem to be scored."""
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("judge", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"there is no judge at {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["judge"] = module
    spec.loader.exec_module(module)
    return module

"""How a bench ends: its goals, passed or missed, and one JSON line with what was measured and by which versions.

Read by the other files of this folder; it measures nothing itself.
"""

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from typing import Any


def finish(record: dict[str, Any], goals: dict[str, bool], packages: Sequence[str]) -> None:
    """Print both; `packages` are those on whose versions the numbers depend."""
    for goal, met in goals.items():
        print(f"{'pass' if met else 'MISS'}  {goal}")
    record |= {
        "missed": [goal for goal, met in goals.items() if not met],
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }
    print(json.dumps(_rounded(record)))


def _rounded(record: Any) -> Any:
    if isinstance(record, dict):
        return {key: _rounded(value) for key, value in record.items()}
    return float(f"{record:.4g}") if isinstance(record, float) else record

"""Settings of all tests: on a build machine random cases are the same every time, so that a red build can be repeated."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("build", derandomize=True, deadline=None)
settings.register_profile("here", deadline=None)
settings.load_profile("build" if os.environ.get("CI") else "here")

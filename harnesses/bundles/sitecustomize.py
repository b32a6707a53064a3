"""Lies in the standard library of a bundle's Python: which program starts it, and where its packages are."""

import os
import site
import sys

sys.executable = os.path.join(sys.prefix, "bin", "python3")  # noqa: PTH118 - pathlib takes long to import
sys._base_executable = sys.executable  # type: ignore[attr-defined]
site.addsitedir(os.path.join(sys.prefix, "packages"))  # noqa: PTH118

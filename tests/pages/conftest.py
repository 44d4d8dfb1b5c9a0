"""The hooks of the site are modules beside its pages, not a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs" / "hooks"))

"""Results as runs would leave them, without running anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from reproduction.paper.results.planned import Place, Result


@dataclass(frozen=True)
class Counting:
    """A run that leaves a mark for every time it is made, and fails while a file says so."""

    name: str
    marks: str

    default: int = 1

    seed: ClassVar[int] = 0
    curves: ClassVar[tuple[str, ...]] = ("value",)

    @property
    def full_settings(self) -> dict[str, Any]:
        return {"counting": {"name": self.name, "default": self.default}}

    @property
    def problem(self) -> str:
        return self.name

    @property
    def needs_images(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return 1.0

    def run(self, place: Place) -> Result:
        folder = Path(self.marks)
        if (folder / f"{self.name}-fails").exists():
            raise RuntimeError("interrupted")
        with (folder / self.name).open("a") as file:
            file.write("x")
        return {"finals": {"default": self.default}, "curves": {"value": [self.name]}, "epsilon_total": 1.0}

    @property
    def times(self) -> int:
        path = Path(self.marks) / self.name
        return len(path.read_text()) if path.exists() else 0

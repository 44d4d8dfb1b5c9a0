"""Where the patches of a convolution lie."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Where patches lie: `size` rows and columns apart by `dilation`, every `stride`."""

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def span(self, axis: int) -> int:
        return (self.size[axis] - 1) * self.dilation[axis] + 1

    def outputs(self, height: int, width: int) -> Pair:
        lengths = (height + 2 * self.padding[0], width + 2 * self.padding[1])
        return (
            (lengths[0] - self.span(0)) // self.stride[0] + 1,
            (lengths[1] - self.span(1)) // self.stride[1] + 1,
        )

    def pooled(self, pool: Pair) -> Window:
        """The window that holds all patches that one pool window compares."""
        rows, columns = (self.span(i) + (pool[i] - 1) * self.stride[i] for i in (0, 1))
        step = (self.stride[0] * pool[0], self.stride[1] * pool[1])
        return Window((rows, columns), step, self.padding)

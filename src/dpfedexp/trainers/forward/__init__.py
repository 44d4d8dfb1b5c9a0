"""One forward pass of one client's module: what it draws, and how it attends."""

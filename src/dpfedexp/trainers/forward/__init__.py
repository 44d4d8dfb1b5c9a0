"""One forward pass of one client's module: what it draws, and the operations of torch that `vmap` does not know."""

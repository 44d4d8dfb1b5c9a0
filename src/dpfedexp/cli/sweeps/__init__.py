"""Many runs of one file: a grid of settings, what was found, and what trying all of it costs the clients."""

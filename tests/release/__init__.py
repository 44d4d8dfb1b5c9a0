"""The built files where there is no source tree: `make wheel-check`, `make release` and `make flower-versions`."""

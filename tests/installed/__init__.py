"""The built wheel in an environment of its own: `python -m tests.installed dist/dpfedexp-….whl`."""

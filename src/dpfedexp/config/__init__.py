"""Runs as TOML files: the settings that a file may hold, and what they build."""

from dpfedexp.config.settings import DataSettings, Resolved, Settings, load, parse

__all__ = ["DataSettings", "Resolved", "Settings", "load", "parse"]

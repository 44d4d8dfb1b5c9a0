"""Settings of a run in a TOML file, and the objects that they build."""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.config.settings import DataSettings as DataSettings
    from dpfedexp.config.settings import Resolved as Resolved
    from dpfedexp.config.settings import Settings as Settings
    from dpfedexp.config.settings import load as load
    from dpfedexp.config.settings import parse as parse
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

"""Deployment on Flower: `DpFedExp` on the server, `private_training` on the clients.

Flower is imported when one of these names is first used, so the rest of the library works without it.
"""

from typing import TYPE_CHECKING, Any

from dpfedexp.errors import InputError
from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.flower.app_settings import data_path as data_path
    from dpfedexp.flower.client import answer as answer
    from dpfedexp.flower.client import clip_and_randomize as clip_and_randomize
    from dpfedexp.flower.client import private_training as private_training
    from dpfedexp.flower.guard import Guard as Guard
    from dpfedexp.flower.strategy import DpFedExp as DpFedExp
    from dpfedexp.flower.strategy import serve as serve
    from dpfedexp.flower.strategy import strategy_from as strategy_from
else:
    _load, __dir__, __all__ = lazy_names(__name__)

    def __getattr__(name: str) -> Any:
        try:
            return _load(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "flwr":
                raise
            raise InputError("Flower is not installed; install it with: pip install 'dpfedexp[flower]'.") from None

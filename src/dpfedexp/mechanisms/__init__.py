"""What a client does, what the server does, and the event that is charged, in one object each."""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

_HOMES = {
    "CentralGaussian": "gaussian",
    "LocalGaussian": "gaussian",
    "Mechanism": "base",
    "NoPrivacy": "none",
    "Noise": "base",
    "PrivUnit": "privunit",
    "Release": "base",
    "Report": "base",
}

if TYPE_CHECKING:
    from dpfedexp.mechanisms.base import Mechanism as Mechanism
    from dpfedexp.mechanisms.base import Noise as Noise
    from dpfedexp.mechanisms.base import Release as Release
    from dpfedexp.mechanisms.base import Report as Report
    from dpfedexp.mechanisms.gaussian import CentralGaussian as CentralGaussian
    from dpfedexp.mechanisms.gaussian import LocalGaussian as LocalGaussian
    from dpfedexp.mechanisms.none import NoPrivacy as NoPrivacy
    from dpfedexp.mechanisms.privunit import PrivUnit as PrivUnit
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)

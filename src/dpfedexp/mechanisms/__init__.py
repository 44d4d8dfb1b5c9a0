"""What a client does, what the server does, and the event that is charged, in one object each."""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.mechanisms.base import Mechanism as Mechanism
    from dpfedexp.mechanisms.base import NoPrivacy as NoPrivacy
    from dpfedexp.mechanisms.base import Release as Release
    from dpfedexp.mechanisms.base import Report as Report
    from dpfedexp.mechanisms.base import Secure as Secure
    from dpfedexp.mechanisms.base import Terms as Terms
    from dpfedexp.mechanisms.central_gaussian import CentralGaussian as CentralGaussian
    from dpfedexp.mechanisms.local_gaussian import LocalGaussian as LocalGaussian
    from dpfedexp.mechanisms.one_vector import Private as Private
    from dpfedexp.mechanisms.one_vector import privatize as privatize
    from dpfedexp.mechanisms.privunit import PrivUnit as PrivUnit
    from dpfedexp.mechanisms.registry import MECHANISMS as MECHANISMS
    from dpfedexp.mechanisms.registry import mechanism_class as mechanism_class
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

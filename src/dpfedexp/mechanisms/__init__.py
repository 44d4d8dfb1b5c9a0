"""Privacy mechanisms: each object has the client's side, the server's side, and the event that is charged."""

from typing import TYPE_CHECKING

from dpfedexp.lazy import lazy_names

if TYPE_CHECKING:
    from dpfedexp.mechanisms.base import Mechanism as Mechanism
    from dpfedexp.mechanisms.base import MechanismSpec as MechanismSpec
    from dpfedexp.mechanisms.base import NoPrivacy as NoPrivacy
    from dpfedexp.mechanisms.base import Release as Release
    from dpfedexp.mechanisms.base import Report as Report
    from dpfedexp.mechanisms.base import Secure as Secure
    from dpfedexp.mechanisms.central_gaussian import CentralGaussian as CentralGaussian
    from dpfedexp.mechanisms.local_gaussian import LocalGaussian as LocalGaussian
    from dpfedexp.mechanisms.privunit import PrivUnit as PrivUnit
    from dpfedexp.mechanisms.registry import MECHANISMS as MECHANISMS
    from dpfedexp.mechanisms.registry import mechanism_class as mechanism_class
    from dpfedexp.mechanisms.single_release import PrivateVector as PrivateVector
    from dpfedexp.mechanisms.single_release import privatize as privatize
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)

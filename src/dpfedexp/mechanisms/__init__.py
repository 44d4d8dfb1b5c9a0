"""What a client does, what the server does, and the event that is charged, in one object each."""

from dpfedexp.mechanisms.base import Mechanism, Release, Report, Secure, Terms
from dpfedexp.mechanisms.central_gaussian import CentralGaussian
from dpfedexp.mechanisms.local_gaussian import LocalGaussian
from dpfedexp.mechanisms.none import NoPrivacy
from dpfedexp.mechanisms.privunit import PrivUnit
from dpfedexp.mechanisms.registry import MECHANISMS, mechanism_class

__all__ = [
    "MECHANISMS",
    "CentralGaussian",
    "LocalGaussian",
    "Mechanism",
    "NoPrivacy",
    "PrivUnit",
    "Release",
    "Report",
    "Secure",
    "Terms",
    "mechanism_class",
]

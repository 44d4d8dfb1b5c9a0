"""What a client does, what the server does, and the event that is charged, in one object each."""

from dpfedexp.mechanisms.base import Mechanism, Noise, Release, Report
from dpfedexp.mechanisms.gaussian import CentralGaussian, LocalGaussian
from dpfedexp.mechanisms.none import NoPrivacy
from dpfedexp.mechanisms.privunit import PrivUnit

__all__ = ["CentralGaussian", "LocalGaussian", "Mechanism", "NoPrivacy", "Noise", "PrivUnit", "Release", "Report"]

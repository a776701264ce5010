"""Fingerprints: functions and other objects as one hash, and whose code they are."""

from forge.executors.fingerprint.owners import here, name_in_torch, owner_of_module
from forge.executors.fingerprint.walk import Fingerprint, fingerprint_of

__all__ = ["Fingerprint", "fingerprint_of", "here", "name_in_torch", "owner_of_module"]

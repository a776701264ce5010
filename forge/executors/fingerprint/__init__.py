"""Fingerprints: functions and other objects as one hash, and whose code they are."""

from forge.executors.fingerprint.owners import name_in_torch, owner_of_module, verifier_versions
from forge.executors.fingerprint.walk import Fingerprint, fingerprint_of

__all__ = ["Fingerprint", "fingerprint_of", "name_in_torch", "owner_of_module", "verifier_versions"]

"""Drafters: what proposes the tokens that the policy verifies."""

from specjax.drafters.base import Drafter, Proposal
from specjax.drafters.eagle3 import Eagle3Drafter, Eagle3Network
from specjax.drafters.none import NoDrafter

__all__ = ["Drafter", "Eagle3Drafter", "Eagle3Network", "NoDrafter", "Proposal"]

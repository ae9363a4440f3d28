"""Drafters: what proposes the tokens that the policy verifies."""

from specjax.drafters.base import Drafter, Proposal
from specjax.drafters.head import DraftHead, HeadDrafter
from specjax.drafters.none import NoDrafter

__all__ = ["DraftHead", "Drafter", "HeadDrafter", "NoDrafter", "Proposal"]

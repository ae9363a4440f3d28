"""Drafters, which propose the tokens that the policy verifies."""

from specjax.drafters.base import Drafter, DraftLoss, Proposal
from specjax.drafters.block import BlockDrafter, BlockHead
from specjax.drafters.head import DraftHead, HeadDrafter
from specjax.drafters.history import HistoryDrafter
from specjax.drafters.lookup_beside_head import EitherDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NGramDrafter
from specjax.drafters.none import NoDrafter

__all__ = [
    "BlockDrafter",
    "BlockHead",
    "DraftHead",
    "DraftLoss",
    "Drafter",
    "EitherDrafter",
    "HeadDrafter",
    "HistoryDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "NoDrafter",
    "Proposal",
]

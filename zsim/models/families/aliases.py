"""Models as people and papers spell them, and the presets that have their sizes."""

from __future__ import annotations

import re

LLAMAS = {
    ("2", "7"): "llama-2-7b",
    ("2", "13"): "llama-2-13b",
    ("2", "34"): "llama-2-34b",
    ("2", "70"): "llama-2-70b",
    ("3", "8"): "llama-3-8b",
    ("3", "70"): "llama-3-70b",
    ("3", "405"): "llama-3-405b",
    ("3.1", "8"): "llama-3-8b",
    ("3.1", "70"): "llama-3-70b",
    ("3.1", "405"): "llama-3-405b",
    ("3.2", "1"): "llama-3.2-1b",
    ("3.2", "3"): "llama-3.2-3b",
    ("3.3", "70"): "llama-3-70b",
}
"""Presets by generation and billions of parameters; 3.1 and 3.3 have the sizes of 3."""
_BEFORE, _BEHIND = (
    r"(?:meta-llama/)?(?:meta[-_ ]?)?llama[-_ ]?v?", r"[-_ ]?b(?:[-_ ](?:hf|base|instruct|chat))*",
)
_MPT = r"(?:mosaicml/)?mpt[-_ ]*(\d+[mb])(?:[-_ ](?:base|instruct|chat|8k|storywriter))*"


def llama(name: str) -> str:
    """The preset of the Llama that `name` spells, as "Llama 3.1 8B" or llama3-8b, "" for another
    model."""
    word = name.strip().lower()
    for (generation, size), known in LLAMAS.items():
        if re.fullmatch(f"{_BEFORE}{generation.replace('.', '[-._]?')}[-_ ]*{size}{_BEHIND}", word):
            return known
    return ""


def mpt(name: str) -> str:
    """Name that the preset of the MPT spelt `name` would have, "" for another model."""
    match = re.fullmatch(_MPT, name.strip().lower())
    return f"mpt-{match[1]}" if match else ""

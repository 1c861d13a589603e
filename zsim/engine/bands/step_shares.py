"""A step's shares and the error band that they sum up to; the widths come from error_bands.

Errors of the shares are independent, so their squares add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

OVERLAP = 0.2
"""Share of hidden communication by which a step may take longer. Kernels lose a tenth to a third of
it here. Measured are 18.9 % of all compute on average and 40 % at most (arXiv 2507.03114), however
much of it was beside a collective. Collectives lose time beside kernels too, and no share of it is
published."""
LARGEST_WIDTH = 0.9
"""Largest half-width, as a share of the time: a prediction is never zero. Assumed."""


class StepShare(NamedTuple):
    """A share of the step, and the half-width of its time as a share of that time."""

    share: float
    width: float

    @property
    def slower(self) -> float:
        """Addition to the step at the upper end of the band, as a share of it.

        There the rate is below the expected one by the same share as the time is at the lower end.
        """
        return self.share * self.width / (1 - min(LARGEST_WIDTH, self.width))

    @property
    def faster(self) -> float:
        """Reduction of the step at the lower end of the band, as a share of it."""
        return self.share * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """The shares of a step from which its error band follows."""

    compute: StepShare
    network: StepShare
    """Exposed communication."""
    host: StepShare
    """Time in which the device waits for the host."""
    hidden: float
    """Share of the step: communication that compute covers."""
    spare: float
    """Share of the step: compute between the first collective and the last that covers none."""
    growth: float = 0.0
    """Addition by more nodes than constants were fitted to, as a share of the step."""
    paused: float = 0.0
    """Addition of a GPU's host that pauses, as a share of the step."""
    issuing: float = 0.0
    """Share of the step: the host's own time to issue its ops."""
    stepped: float = 0.0
    """Addition of a slower optimizer's step on a GPU's host, as a share of the step."""
    hurried: float = 0.0
    """Reduction of that step by more threads, as a share of the whole step."""
    full: float = 0.0
    """Addition of a device that gives cached memory back in the step, or may have to, as a share of
    it."""
    unroomed: float = 0.0
    """Half-width of a whole step that has no room."""
    least: float = 0.0
    """Half-width of whole steps by a calibration on this machine, whose errors are not of kernels
    alone; 0 without one."""

    @property
    def longer(self) -> float:
        """Addition of slower collectives. Exposed ones grow; hidden ones become exposed where no
        compute is left to cover them."""
        return self.network.faster + max(0.0, self.hidden * self.network.width - self.spare)

    @property
    def shorter(self) -> float:
        """Largest reduction by faster collectives: all exposed communication, if hidden collectives
        leave it enough compute."""
        return min(self.network.share, (self.network.share + self.hidden) * self.network.width)

    @property
    def later(self) -> float:
        """Addition of a slower host: the device waits longer for it, or its hidden time to issue
        ops outgrows the step."""
        return max(self.host.slower, self.issuing / (1 - self.host.width) - 1)

    @property
    def beside(self) -> float:
        """Addition of kernels that lose more to the collectives beside them."""
        return OVERLAP * self.hidden

    @property
    def factors(self) -> tuple[float, float]:
        """(low, high) around the predicted time. Errors of the shares are independent, so their
        squares add up."""
        return self._summed(self.shorter, self.longer)

    def _summed(self, shorter: float, longer: float) -> tuple[float, float]:
        """The factors where collectives make the step so much `shorter` or `longer`."""
        unroomed = StepShare(share=1.0, width=self.unroomed)
        low = hypot(
            self.compute.faster, shorter, self.host.faster, unroomed.faster, self.hurried
        )
        high = hypot(
            self.compute.slower, longer, self.later, self.paused, self.beside, self.full,
            unroomed.slower, self.stepped,
        )
        return self._whole(low, high + self.growth)

    def _whole(self, low: float, high: float) -> tuple[float, float]:
        """The factors for a reduction `low` and an addition `high`, no nearer to 1 than `least`
        allows."""
        least = StepShare(share=1.0, width=self.least)
        return 1 - min(LARGEST_WIDTH, max(low, least.faster)), 1 + max(high, least.slower)

    def on_shared_network(self, least: float, most: float) -> tuple[float, float]:
        """(low, high) on a network with traffic of others, where collectives take from `least` to
        `most` times as long."""
        communication = self.network.share + self.hidden
        shorter = max(self.shorter, min(self.network.share, communication * (1 - least)))
        longer = max(
            self.longer,
            self.network.share * (most - 1) + max(0.0, self.hidden * (most - 1) - self.spare),
        )
        return self._summed(shorter, longer)


def widened(low: float, high: float, *, by: float) -> tuple[float, float]:
    """The factors `low` and `high` of a band where a time may be longer, or shorter, by the share
    `by` for another reason. Both are independent, so their squares add up."""
    return (
        1 - min(LARGEST_WIDTH, hypot(1 - low, by / (1 + by))), 1 + hypot(high - 1, by)
    )

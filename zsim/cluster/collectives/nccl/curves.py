"""Constants of NCCL's times, and the curves that were measured on a machine in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.cluster.collectives.nccl.communicator import Communicator
from zsim.cluster.collectives.nccl.constants import CONSTANTS, Constants
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.cluster.links import Generation, MeasuredCurve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """The constants of mechanisms, and a machine's `own` curves.

    A curve is found by its scope, the generation of GPUs or the fabric of the network, and the
    collective.
    """

    constants: Constants = CONSTANTS
    own: Mapping[tuple[str, str, str], MeasuredCurve] = field(default_factory=dict)
    own_switch: frozenset[Generation] = frozenset()
    """Generations whose curve of the switch is a machine's own, measured of what NCCL chose there
    by itself. Its choice goes by that curve alone. The ring beside it is that of other machines,
    which would hold every prediction to no more than theirs take."""

    def measured(
        self, algorithm: Algorithm, op: str, communicator: Communicator
    ) -> MeasuredCurve | None:
        """The machine's own curve of `op` by `algorithm`; None without one, and for broadcasts, PAT
        and rings over PCIe."""
        if not self.own or communicator.links == "pcie" or algorithm == "pat":
            return None
        if communicator.num_nodes > 1:
            return self.own.get(("network", communicator.fabric, op))
        if algorithm == "nvls" and communicator.num_ranks > 8:
            return None
        return self.own.get((algorithm, communicator.generation, op))


CURVES = Curves()
"""The constants of presets."""

"""Every system whose figures can be made again, by its name."""

from penstock.reproduce.aceso import ACESO_FIGURES
from penstock.reproduce.dynapipe import DYNAPIPE_FIGURES
from penstock.reproduce.dynpipe import DYNPIPE_FIGURES
from penstock.reproduce.fasop import FASOP_FIGURES

__all__ = ["REPRODUCTIONS"]

REPRODUCTIONS = {one.name: one for one in (ACESO_FIGURES, DYNAPIPE_FIGURES, FASOP_FIGURES, DYNPIPE_FIGURES)}

"""Published planning systems: their cost tables, plan files, cost rules, and searches over their tables."""

from penstock.systems.aceso import ACESO
from penstock.systems.dynapipe import DYNAPIPE
from penstock.systems.dynpipe import DYNPIPE
from penstock.systems.fasop import FASOP
from penstock.systems.system import PlanFile, PlanFiles, System, TableAnswer, TableScore, TableSearch

__all__ = ["SYSTEMS", "PlanFile", "PlanFiles", "System", "TableAnswer", "TableScore", "TableSearch"]

SYSTEMS = {system.name: system for system in (DYNPIPE, ACESO, FASOP, DYNAPIPE)}
"""Every system by its name; commands read what each can do from here."""

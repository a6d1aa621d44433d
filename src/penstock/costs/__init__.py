"""What everything costs: one interface, `source.CostSource`, with two implementations, and the memory of a device.

`table` is the form of all answers about ops, `roofline` models them, `profiled` interpolates what `profile` holds, `sources` opens
either by name. `collectives` has the times of messages, `memory` and `replay` have bytes. Modules are imported by their own names.
"""

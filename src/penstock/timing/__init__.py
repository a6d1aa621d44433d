"""From costs to time: what the passes of a stage take, and the clocks that run a schedule of them."""

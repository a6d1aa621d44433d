"""Going on after a rank has died: copies of what it had learned, faults to try it with, and who decides where to go on from."""

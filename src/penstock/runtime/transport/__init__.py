"""The processes of a job and their groups, and how tensors travel between them."""

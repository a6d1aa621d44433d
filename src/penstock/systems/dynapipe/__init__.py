"""DynaPipe (EuroSys 2024): its cost models, and batches planned under them."""

"""DynPipe: its topology and partition files, as plans and from plans."""

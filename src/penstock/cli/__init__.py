"""The command line: one small file per verb, none of them imported before it is needed."""

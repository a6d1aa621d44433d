"""From a person's model and raw data to a running training: job files, prepared data, measured costs, a plan, and the run itself."""

"""A job on several machines: a supervisor on each, of which one leads, their channel, and the copies that they keep for each other."""

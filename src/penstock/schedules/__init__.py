"""Pipeline schedules as data, and the simulator they are judged by."""

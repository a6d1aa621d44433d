"""Pipeline schedules as data: actions and their text, the orders of each schedule, and `rules`, what each schedule asks and gives."""
